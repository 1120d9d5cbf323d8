"""Depthwise causal convolutions of one input, as before a layer's projections and in Canon layers.

For each weight, ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``, over the positions that t sees.
The function for users of this module is ``hypermlp.ops.api.causal_conv``.

Shapes: B batch, T positions, D width, K taps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.arguments import schema
from hypermlp.ops.library import in_vmap, register

Convolution = Callable[[Tensor, list[Tensor], int, Tensor | None], list[Tensor]]
"""Return an output for each weight, from x, the weights, T and reach (see ``causal_conv``)."""


class Arguments(NamedTuple):
    """The arguments of the operator."""

    x: Tensor
    weights: list[Tensor]
    length: int
    reach: Tensor | None


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


def reference_conv(x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None) -> list[Tensor]:
    """Compute the convolutions tap by tap in plain PyTorch."""
    dtype, taps = _compute_dtype(x, weights[0]), weights[0].shape[1]
    outs = [x.new_zeros(x.shape[0], length, x.shape[2], dtype=dtype) for _ in weights]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    for lag in range(taps):
        tap = hide_unseen(tap_rows(padded, lag, length).to(dtype), lag, reach)
        for out, weight in zip(outs, weights, strict=True):
            out.addcmul_(tap, weight[:, lag])
    return [out.to(x.dtype) for out in outs]


def _gradients(
    grads: list[Tensor],
    _kept: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    length: int,
    reach: Tensor | None,
) -> list[Tensor]:
    dtype, taps = _compute_dtype(x, weights[0]), weights[0].shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    grad_padded = torch.zeros_like(padded, dtype=dtype)
    grad_weights = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    for lag in range(taps):
        tap = tap_rows(padded, lag, length).to(dtype)
        for grad, weight, grad_weight in zip(grads, weights, grad_weights, strict=True):
            seen = hide_unseen(grad.to(dtype), lag, reach)
            tap_rows(grad_padded, lag, length).addcmul_(seen, weight[:, lag])
            grad_weight[:, lag] = (seen * tap).flatten(0, 1).sum(0)
    return [
        grad_padded[:, taps - 1 :].to(x.dtype),
        *(grad.to(weight.dtype) for grad, weight in zip(grad_weights, weights, strict=True)),
    ]


def _fake(x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape[0], length, x.shape[2]) for _ in weights]


def _triton(*arguments: Any) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import conv

    return conv(*arguments)


def _triton_gradients(grads: list[Tensor], _kept: list[Tensor], *arguments: Any) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import conv_gradients

    return conv_gradients(grads, *arguments)


def _register(name: str, backend: str, **kernels: Any) -> Convolution:
    what = f"causal_conv in backend {backend!r}"
    operator: Convolution = register(name, schema(Arguments), "Tensor[]", _fake, what=what, **kernels)

    def run(x: Tensor, weights: list[Tensor], length: int, reach: Tensor | None) -> list[Tensor]:
        if in_vmap():  # PyTorch has no fallback for operators that return lists
            return reference_conv(x, weights, length, reach)
        return operator(x, weights, length, reach)

    return run


native_conv = _register("native_conv", "native")  # the kernels are in csrc/conv.cpp
blocked_conv = _register("conv", "blocked", kernel=reference_conv, gradient_kernel=_gradients)
triton_conv = _register("triton_conv", "triton", kernel=_triton, gradient_kernel=_triton_gradients)
