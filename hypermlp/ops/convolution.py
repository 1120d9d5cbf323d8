"""A pair of depthwise causal convolutions of one input: the inputs of a layer's key and value projections.

For each of the two weights, ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``, over the positions
that t sees. The function for users of this module is ``hypermlp.ops.api.causal_conv_pair``.

Shapes: B batch, T positions, D width, K taps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.library import Operator, call, define, differentiate, refuse_transforms

ConvPair = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]
"""Return both outputs, from x, both weights, T and reach (see ``causal_conv_pair``)."""


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def tap_rows(padded: Tensor, lag: int, length: int) -> Tensor:
    """Return the rows of ``padded`` (x with K - 1 zero rows before it) that meet the T outputs at this
    lag.
    """
    end = padded.shape[1] - lag
    return padded[:, end - length : end]


def hide_unseen(x: Tensor, lag: int, reach: Tensor | None) -> Tensor:
    """Zero the rows of positions that do not see as far back as ``lag``."""
    return x if reach is None else x.masked_fill((reach <= lag)[:, :, None], 0)


def reference_conv_pair(
    x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute both convolutions tap by tap in plain PyTorch."""
    dtype, taps = _compute_dtype(x, weight1), weight1.shape[1]
    outs = [x.new_zeros(x.shape[0], length, x.shape[2], dtype=dtype) for _ in range(2)]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    for lag in range(taps):
        tap = hide_unseen(tap_rows(padded, lag, length).to(dtype), lag, reach)
        for out, weight in zip(outs, (weight1, weight2), strict=True):
            out.addcmul_(tap, weight[:, lag])
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
    dtype, taps = _compute_dtype(x, weight1), weight1.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    grad_padded = torch.zeros_like(padded, dtype=dtype)
    grad_weight1, grad_weight2 = (torch.empty_like(weight, dtype=dtype) for weight in (weight1, weight2))
    for lag in range(taps):
        tap = tap_rows(padded, lag, length).to(dtype)
        grads = [hide_unseen(grad.to(dtype), lag, reach) for grad in (grad1, grad2)]
        for grad, weight, grad_weight in zip(
            grads, (weight1, weight2), (grad_weight1, grad_weight2), strict=True
        ):
            tap_rows(grad_padded, lag, length).addcmul_(grad, weight[:, lag])
            grad_weight[:, lag] = (grad * tap).flatten(0, 1).sum(0)
    return (
        grad_padded[:, taps - 1 :].to(x.dtype),
        grad_weight1.to(weight1.dtype),
        grad_weight2.to(weight2.dtype),
    )


def _fake(
    x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], length, x.shape[2])
    return x.new_empty(shape), x.new_empty(shape)


def _fake_backward(
    grad1: Tensor,
    grad2: Tensor,
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    length: int,
    reach: Tensor | None,
) -> tuple[Tensor, ...]:
    return tuple(y.new_empty(y.shape) for y in (x, weight1, weight2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight1, weight2, ctx.length, reach = inputs
    ctx.save_for_backward(x, weight1, weight2, reach)


def _register(name: str, backend: str) -> ConvPair:
    """Register ``hypermlp::{name}`` and its gradients; return the function that the backend runs."""
    what = f"causal_conv_pair in backend {backend!r}"
    arguments = "Tensor x, Tensor weight1, Tensor weight2, SymInt length, Tensor? reach"
    forward_op = define(name, f"({arguments}) -> (Tensor, Tensor)", _fake)
    backward_schema = f"(Tensor grad1, Tensor grad2, {arguments}) -> (Tensor, Tensor, Tensor)"
    backward_op: Operator = define(f"{name}_backward", backward_schema, _fake_backward)

    def backward(ctx: Any, grad1: Tensor, grad2: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, weight2, reach = ctx.saved_tensors
        return *backward_op(grad1, grad2, x, weight1, weight2, ctx.length, reach), None, None

    differentiate(name, f"{name}_backward", what, backward, _save)

    def run(
        x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        refuse_transforms(what)
        outs: tuple[Tensor, Tensor] = call(forward_op, x, weight1, weight2, length, reach)
        return outs

    return run


native_conv_pair = _register("native_conv_pair", "native")  # the kernels are in csrc/conv.cpp
blocked_conv_pair = _register("conv_pair", "blocked")
torch.library.impl("hypermlp::conv_pair", "default", reference_conv_pair)
torch.library.impl("hypermlp::conv_pair_backward", "default", _backward)


def _triton(x: Tensor, weight1: Tensor, weight2: Tensor, length: int, reach: Tensor | None) -> Any:
    from hypermlp.ops.triton.elementwise import conv_pair

    return conv_pair(x, weight1, weight2, length, reach)


def _triton_backward(*arguments: Any) -> Any:
    from hypermlp.ops.triton.elementwise import conv_pair_backward

    return conv_pair_backward(*arguments)


triton_conv_pair = _register("triton_conv_pair", "triton")
torch.library.impl("hypermlp::triton_conv_pair", "default", _triton)
torch.library.impl("hypermlp::triton_conv_pair_backward", "default", _triton_backward)
