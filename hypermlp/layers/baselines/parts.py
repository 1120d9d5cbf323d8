"""Small parts that several baselines use.

Shapes: B batch, T new positions, D width, H heads, C their width, K taps.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import attend
from hypermlp.ops.arguments import Attention
from hypermlp.ops.convolution import hide_unseen, tap_rows

Operator = TypeVar("Operator", bound=Callable[..., Any])
Memory = Tensor | None
"""The memory of a recurrence before the first new position; None for zeros."""
Reach = Tensor | None
"""How many positions each new position sees, itself included, int64 ``[B, T]``: 0 for padding, 1 where a
document begins. None if each position sees all up to itself."""


def full_precision(operator: Operator) -> Operator:
    """Run ``operator`` outside autocast: sums over a whole sequence are not rounded to half precision."""

    @functools.wraps(operator)
    def without_autocast(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return cast(Operator, without_autocast)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in its own dtype if that is more precise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def remembered(state: DecodingState | None, name: str) -> Tensor | None:
    """Return a tensor of fixed size from the state; None without a state or before the first call."""
    return None if state is None else state.get(name)


def starting_memory(memory: Memory, like: Tensor) -> Tensor:
    """Return ``memory`` in the dtype of ``like``; zeros of its shape if there is none."""
    return torch.zeros_like(like) if memory is None else memory.to(like.dtype)


def split_heads(num_heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Split the last dimension of each tensor: ``[..., H * C] -> [..., H, C]``."""
    return tuple(x.unflatten(-1, (num_heads, -1)) for x in tensors)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Return causal softmax attention of the last positions, in PyTorch's fused kernel.

    Args:
        q: ``[B, H, T, C]``, of the new positions.
        k, v: ``[B, H, past + T, C]`` and ``[B, H, past + T, any width]``; with a sliding window, the last
            rows are enough.
    """
    if visibility.window is not None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v, starts = visibility.operands(k, v)
        arguments = Attention(q, k, v, None, None, starts, "softmax", "lag", eps=1.0)
        return attend(arguments, "sdpa", visibility.window).transpose(1, 2)
    new, total = q.shape[2], k.shape[2]
    if visibility.reach is None and new in (1, total):  # no mask: the kernel is faster
        causal = True if new > 1 else False  # noqa: SIM210 (the comparison may be symbolic)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visibility.mask())


def causal_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Return the number of keys that the last ``queries`` of ``keys`` positions see, summed over these.

    Each sees at most ``window`` keys; None for any number.
    """
    full = queries if window is None else max(0, min(queries, window - (keys - queries)))  # see all keys
    seen_by_full = full * (keys - queries) + full * (full + 1) // 2
    return seen_by_full + (queries - full) * (window or 0)


def short_conv(x: Tensor, weight: Tensor, state: DecodingState | None, reach: Reach) -> Tensor:
    """Convolve each channel of ``x``, ``[B, T, D]``, along the positions of its document.

    ``y[t] = sum over lags i < K of weight[:, i] * x[t - i]``, with ``weight`` ``[D, K]``.
    """
    return _Conv.apply(_with_past(x, weight.shape[1] - 1, state, "conv"), weight, x.shape[1], reach)


def shifted(x: Tensor, state: DecodingState | None, reach: Reach) -> Tensor:
    """Return each position's predecessor, ``[B, T, D]``; zero where a position sees none."""
    return hide_unseen(_with_past(x, 1, state, "previous")[:, :-1], 1, reach)


def _with_past(x: Tensor, count: int, state: DecodingState | None, name: str) -> Tensor:
    """Return ``x`` after the ``count`` rows before it, zero at first, which the state keeps as ``name``."""
    past = remembered(state, name)
    rows = F.pad(x, (0, 0, count, 0)) if past is None else torch.cat([past, x], dim=1)
    if state is not None:
        state[name] = rows[:, x.shape[1] :].clone()  # a view would keep all rows alive, or be the caller's x
    return rows


class _Conv(torch.autograd.Function):
    """The convolution, tap by tap in place.

    On a CPU, PyTorch's own depthwise convolution and its gradients are several times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, length: int, reach: Reach) -> Tensor:
        ctx.save_for_backward(x, weight, reach)
        out = tap_rows(x, 0, length) * weight[:, 0]
        for lag in range(1, weight.shape[1]):
            out.addcmul_(hide_unseen(tap_rows(x, lag, length), lag, reach), weight[:, lag])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, reach = ctx.saved_tensors
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for lag in range(weight.shape[1]):
            seen, length = hide_unseen(grad, lag, reach), grad.shape[1]
            grad_weight[:, lag] = (seen * tap_rows(x, lag, length)).flatten(0, 1).sum(0)
            tap_rows(grad_x, lag, length).addcmul_(seen, weight[:, lag])
        return grad_x, grad_weight, None, None


def initial_uniform(shape: Sequence[int], inputs: int) -> Tensor:
    """Return what PyTorch gives a layer of ``inputs`` inputs: U(-b, b) with ``b = inputs ** -0.5``."""
    return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5)


def initial_step_bias(count: int) -> Tensor:
    """Return biases whose softplus, the step size, is log-uniform between 0.001 and 0.1."""
    low, high = math.log(1e-3), math.log(0.1)
    steps = torch.exp(torch.rand(count) * (high - low) + low)
    return steps + torch.log(-torch.expm1(-steps))
