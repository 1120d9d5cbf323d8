"""Small parts of several peers."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hypermlp.layers.state import DecodingState

Operator = TypeVar("Operator", bound=Callable[..., Any])


def full_precision(operator: Operator) -> Operator:
    """Autocast stays outside:

    what is summed up over a whole sequence is not rounded to half precision on the way.
    """

    @functools.wraps(operator)
    def outside(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return cast(Operator, outside)


def short_conv(
    x: Tensor, weight: Tensor, state: DecodingState | None, name: str, reach: Tensor | None
) -> Tensor:
    """Depthwise causal convolution, ``[B, T, D]``:

    ``y[t] = sum over lags i of weight[:, i] * x[t - i]``, within the document.
    """
    taps, length = weight.shape[1], x.shape[1]
    past = None if state is None else state.get(name)
    x = F.pad(x, (0, 0, taps - 1, 0)) if past is None else torch.cat([past, x], dim=1)
    if state is not None:
        state[name] = x[:, length:].clone()  # not a view that holds on to everything
    out: Tensor = _Conv.apply(x, weight, length, reach)
    return out


class _Conv(torch.autograd.Function):
    """Tap by tap in place:

    PyTorch's own depthwise convolution and its gradients are several times slower on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, length: int, reach: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, reach)
        out = x[:, -length:] * weight[:, 0]
        for lag in range(1, weight.shape[1]):
            out.addcmul_(_tap(x, lag, length, reach), weight[:, lag])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, reach = ctx.saved_tensors
        length = grad.shape[1]
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for lag in range(weight.shape[1]):
            grad_weight[:, lag] = (grad * _tap(x, lag, length, reach)).flatten(0, 1).sum(0)
            seen = grad if reach is None or lag == 0 else grad.masked_fill((reach <= lag)[:, :, None], 0)
            grad_x.narrow(1, x.shape[1] - length - lag, length).addcmul_(seen, weight[:, lag])
        return grad_x, grad_weight, None, None


def _tap(x: Tensor, lag: int, length: int, reach: Tensor | None) -> Tensor:
    """Rows ``lag`` before the last ``length`` ones, zero where they are not seen."""
    rows = x.narrow(1, x.shape[1] - length - lag, length)
    return rows if reach is None or lag == 0 else rows.masked_fill((reach <= lag)[:, :, None], 0)


def initial_conv(width: int, taps: int) -> Tensor:
    """As PyTorch begins a depthwise convolution."""
    return torch.empty(width, taps).uniform_(-(taps**-0.5), taps**-0.5)


def shifted(x: Tensor, state: DecodingState | None, reach: Tensor | None) -> Tensor:
    """Each position's predecessor, zero where it sees none. ``[B, T, D]``"""
    past = None if state is None else state.get("previous")
    before = torch.cat([torch.zeros_like(x[:, :1]) if past is None else past, x[:, :-1]], dim=1)
    if state is not None:
        state["previous"] = x[:, -1:].clone()  # the caller may write into x
    return before if reach is None else before.masked_fill((reach < 2)[:, :, None], 0)


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs of one of the last ``queries`` positions and a key that it sees."""
    return queries * (keys - queries) + queries * (queries + 1) // 2


def initial_step_bias(count: int) -> Tensor:
    """Step sizes log-uniform between 0.001 and 0.1, as what softplus makes them of."""
    low, high = math.log(1e-3), math.log(0.1)
    steps = torch.exp(torch.rand(count) * (high - low) + low)
    return steps + torch.log(-torch.expm1(-steps))
