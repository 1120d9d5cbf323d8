"""Parts that layers share: the causal convolution and rotary positions.

Shapes: B batch, T positions, D width, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_conv_pair(x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Two depthwise causal convolutions of one input: ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``.

    Args:
        x: ``[B, K - 1 + T, D]``: the T positions and, before them, the K - 1 that came earlier (zeros where none did).
        weight1, weight2: ``[D, K]``, column i for lag i.
        reach: int ``[B, T]``, how many positions, itself first, each position sees; None for all. 0 gives a zero row.

    Returns:
        two tensors ``[B, T, D]`` in the dtype of x.
    """
    return _conv_pair(x, weight1, weight2, reach)


def _taps(x: Tensor, kernel: int, reach: Tensor | None, lag: int) -> Tensor:
    shifted = x[:, kernel - 1 - lag : x.shape[1] - lag]
    return shifted if reach is None else shifted.masked_fill((reach <= lag)[:, :, None], 0)


@torch.library.custom_op("hypermlp::conv_pair", mutates_args=())
def _conv_pair(x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None) -> tuple[Tensor, Tensor]:
    kernel = weight1.shape[1]
    dtype = torch.promote_types(x.dtype, weight1.dtype)
    shape = (x.shape[0], x.shape[1] - kernel + 1, x.shape[2])
    outs = [x.new_zeros(shape, dtype=dtype) for _ in range(2)]
    for lag in range(kernel):
        taps = _taps(x, kernel, reach, lag).to(dtype)
        for out, weight in zip(outs, (weight1, weight2), strict=True):
            out.addcmul_(taps, weight[:, lag])
    return outs[0].to(x.dtype), outs[1].to(x.dtype)


@_conv_pair.register_fake
def _(x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1] - weight1.shape[1] + 1, x.shape[2])
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("hypermlp::conv_pair_backward", mutates_args=())
def _conv_pair_backward(
    grad1: Tensor, grad2: Tensor, x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = weight1.shape[1]
    dtype = torch.promote_types(x.dtype, weight1.dtype)
    grad_x = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    grads = [grad.to(dtype) for grad in (grad1, grad2)]
    grad_weights = [torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format) for weight in (weight1, weight2)]
    for lag in range(kernel):
        taps = _taps(x, kernel, reach, lag).to(dtype)
        weighted = torch.zeros_like(taps)
        for grad, weight, grad_weight in zip(grads, (weight1, weight2), grad_weights, strict=True):
            weighted.addcmul_(grad, weight[:, lag])
            grad_weight[:, lag] = (grad * taps).flatten(0, 1).sum(0)
        if reach is not None:
            weighted.masked_fill_((reach <= lag)[:, :, None], 0)
        grad_x[:, kernel - 1 - lag : x.shape[1] - lag] += weighted
    return grad_x.to(x.dtype), grad_weights[0].to(weight1.dtype), grad_weights[1].to(weight2.dtype)


@_conv_pair_backward.register_fake
def _(
    grad1: Tensor, grad2: Tensor, x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight1.new_empty(weight1.shape), weight2.new_empty(weight2.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> tuple[Tensor | None, ...]:
    return *_conv_pair_backward(grad1, grad2, *ctx.saved_tensors), None


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("causal_conv_pair has no second derivative: gradients of its gradients cannot be computed")


_conv_pair.register_autograd(_backward, setup_context=_save)
_conv_pair_backward.register_autograd(_refuse)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions: channel i is turned with channel i + D / 2 by the angle ``position * theta ** (-2 i / D)``.

    ``x`` is ``[B, T, H, D]``, ``positions`` ``[T]``. Scores of turned queries and keys depend on their distance alone.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions.to(dtype)[:, None] * frequency)[:, None, :]  # [T, 1, D / 2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
