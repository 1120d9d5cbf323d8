"""Parts that layers share: the causal convolution and rotary positions.

Shapes: B batch, T positions, D width, K taps.
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops.backends import choose_backend
from hypermlp.ops.library import Operator, call, define, differentiate, refuse_transforms


def causal_conv_pair(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    length: int,
    reach: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Two depthwise causal convolutions of one input: ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``.

    Args:
        x: ``[B, >= T, D]``: the T positions and, before them, as many earlier ones as there are (K - 1 matter; zeros before).
        weight1, weight2: ``[D, K]``, column i for lag i.
        length: T.
        reach: int64 ``[B, T]``, how many positions, itself first, each position sees; None for all. 0 gives a zero row.
        backend: as for the operator: "native" is the C++ kernel, "blocked" PyTorch with its own backward, "reference" plain PyTorch.

    Returns:
        two tensors ``[B, T, D]`` in the dtype of x.
    """
    chosen = choose_backend(backend, x.device.type, "conv")
    if chosen == "reference":
        return _forward(x, weight1, weight2, length, reach)
    refuse_transforms("causal_conv_pair in backend " + repr(chosen))
    outs: tuple[Tensor, Tensor] = call(
        _native_conv_pair if chosen == "native" else _conv_pair, x, weight1, weight2, length, reach
    )
    return outs


def _tap(lag: int, past: int, reach: Tensor | None) -> tuple[slice, slice, Tensor | None]:
    """Rows of the output that meet a row of x at this lag, those rows of x (``past`` before the first), and which are hidden."""
    first = max(0, lag - past)
    hidden = None if reach is None else (reach[:, first:] <= lag)[:, :, None]
    return slice(first, None), slice(first + past - lag, -lag or None), hidden


def _forward(
    x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight1.dtype), torch.float32)
    outs = [x.new_zeros(x.shape[0], length, x.shape[2], dtype=dtype) for _ in range(2)]
    for lag in range(min(weight1.shape[1], x.shape[1])):
        rows, source, hidden = _tap(lag, x.shape[1] - length, reach)
        tap = x[:, source].to(dtype)
        tap = tap if hidden is None else tap.masked_fill(hidden, 0)
        for out, weight in zip(outs, (weight1, weight2), strict=True):
            out[:, rows].addcmul_(tap, weight[:, lag])
    return outs[0].to(x.dtype), outs[1].to(x.dtype)


def _backward(
    grad1: Tensor,
    grad2: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    length: int,
    reach: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight1.dtype), torch.float32)
    grads = [grad.to(dtype) for grad in (grad1, grad2)]
    grad_x, grad_weight1, grad_weight2 = (y.new_zeros(y.shape, dtype=dtype) for y in (x, weight1, weight2))
    for lag in range(min(weight1.shape[1], x.shape[1])):
        rows, source, hidden = _tap(lag, x.shape[1] - length, reach)
        tap = x[:, source].to(dtype)
        weights = [weight[:, lag] for weight in (weight1, weight2)]
        if hidden is not None:
            tap = tap.masked_fill(hidden, 0)
            weights = [weight * ~hidden for weight in weights]
        for grad, weight, grad_weight in zip(grads, weights, (grad_weight1, grad_weight2), strict=True):
            grad_x[:, source].addcmul_(grad[:, rows], weight)
            grad_weight[:, lag] = (grad[:, rows] * tap).flatten(0, 1).sum(0)
    return grad_x.to(x.dtype), grad_weight1.to(weight1.dtype), grad_weight2.to(weight2.dtype)


def _fake(
    x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], length, x.shape[2])
    return x.new_empty(shape), x.new_empty(shape)


def _fake_backward(grad1: Tensor, grad2: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight1, weight2, ctx.length, reach = inputs
    ctx.save_for_backward(x, weight1, weight2, reach)


def _define_conv_pair(name: str) -> Operator:
    """``hypermlp::{name}`` and its gradients."""
    tensors = "Tensor x, Tensor weight1, Tensor weight2, int length, Tensor? reach"
    forward_op = define(name, f"({tensors}) -> (Tensor, Tensor)", _fake)
    backward_op = define(
        f"{name}_backward",
        f"(Tensor grad1, Tensor grad2, {tensors}) -> (Tensor, Tensor, Tensor)",
        _fake_backward,
    )

    def backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, reach = ctx.saved_tensors
        return *backward_op(grad1, grad2, x, weight1, weight2, ctx.length, reach), None, None

    differentiate(
        name,
        backward,
        _save,
        "causal_conv_pair has no second derivative: gradients of its gradients cannot be computed; backend='reference' has",
    )
    return forward_op


_native_conv_pair = _define_conv_pair("native_conv_pair")  # kernels in C++
_conv_pair = _define_conv_pair("conv_pair")
torch.library.impl("hypermlp::conv_pair", "default", _forward)
torch.library.impl("hypermlp::conv_pair_backward", "default", _backward)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions: channel i is turned with channel i + D / 2 by the angle ``position * theta ** (-2 i / D)``.

    ``x`` is ``[B, T, H, D]``, ``positions`` ``[B or 1, T]``. Scores of turned queries and keys depend on their distance alone.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions.to(dtype)[:, :, None] * frequency)[:, :, None, :]  # [B or 1, T, 1, D / 2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
