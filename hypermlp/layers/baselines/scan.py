"""Recurrences of single numbers, a loop over positions with its own backward: HGRN's and Mamba's.

Shapes: B batch, T positions, D width, N numbers that Mamba keeps for each channel.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.parts import full_precision


def _positions(x: Tensor) -> range:
    """Of ``[B, T, D]``; none where nothing is computed and only sizes matter."""
    return range(0) if x.is_meta or is_fake(x) else range(x.shape[1])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keep: Tensor, add: Tensor, memory: Tensor) -> Tensor:
        states = torch.empty_like(add)
        current = memory
        for t in _positions(add):
            current = torch.addcmul(add[:, t], keep[:, t], current, out=states[:, t])
        ctx.save_for_backward(keep, states, memory)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep, states, memory = ctx.saved_tensors
        grad_add = grad.clone()
        for t in range(grad.shape[1] - 1, 0, -1):
            grad_add[:, t - 1].addcmul_(keep[:, t], grad_add[:, t])
        grad_keep = grad_add * torch.cat([memory[:, None], states[:, :-1]], dim=1)
        return grad_keep, grad_add, keep[:, 0] * grad_add[:, 0]


@full_precision
def scan(keep: Tensor, add: Tensor, memory: Tensor, reach: Tensor | None = None) -> Tensor:
    """``h[t] = keep[t] * h[t-1] + add[t]``, ``[B, T, D]``, from ``memory``, ``[B, D]``; returns all h.

    ``reach`` as in recurrence.py.
    """
    if kernels.usable(keep, reach):
        return kernels.scan(keep, add, memory)
    out: Tensor = _Scan.apply(
        keep if reach is None else keep.masked_fill((reach < 2)[:, :, None], 0), add, memory
    )
    return out


class _SelectiveScan(torch.autograd.Function):
    """Keeps the states ``[T, B, D, N]`` for the backward, and makes the decays anew there."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        decay: Tensor,
        write: Tensor,
        read: Tensor,
        memory: Tensor,
        begins: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        states = x.new_empty(length, *memory.shape)
        out = torch.empty_like(x)
        current, scaled = memory, step * x
        for t in _positions(x):
            keep = _keep(step, decay, begins, t)
            torch.mul(scaled[:, t, :, None], write[:, t, None, :], out=states[t])
            current = states[t].addcmul_(keep, current)
            torch.matmul(current, read[:, t, :, None], out=out[:, t, :, None])
        ctx.save_for_backward(x, step, decay, write, read, memory, begins, states)
        return out, current.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, step, decay, write, read, memory, begins, states = ctx.saved_tensors
        grad_scaled, grad_step = torch.empty_like(x), torch.empty_like(step)
        grad_write, grad_read, grad_decay = (
            torch.empty_like(write),
            torch.empty_like(read),
            torch.zeros_like(decay),
        )
        scaled, grad = step * x, grad_last.clone()
        for t in range(x.shape[1] - 1, -1, -1):
            grad.addcmul_(grad_out[:, t, :, None], read[:, t, None, :])  # now that of state t
            torch.matmul(states[t].mT, grad_out[:, t, :, None], out=grad_read[:, t, :, None])
            torch.matmul(grad, write[:, t, :, None], out=grad_scaled[:, t, :, None])
            torch.matmul(grad.mT, scaled[:, t, :, None], out=grad_write[:, t, :, None])
            grad.mul_(_keep(step, decay, begins, t))
            exponent = grad * (states[t - 1] if t > 0 else memory)  # gradient of step * decay
            torch.sum(exponent * decay, dim=-1, out=grad_step[:, t])
            grad_decay += (exponent * step[:, t, :, None]).sum(0)
        return grad_scaled * step, grad_step + grad_scaled * x, grad_decay, grad_write, grad_read, grad, None


def _keep(step: Tensor, decay: Tensor, begins: Tensor | None, t: int) -> Tensor:
    keep = (step[:, t, :, None] * decay).exp_()
    return keep if begins is None else keep.mul_(~begins[:, t, None, None])


@full_precision
def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, write: Tensor, read: Tensor, memory: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``h[t] = exp(step[t] * decay) * h[t-1] + step[t] x[t] write[t]'``, ``y[t] = h[t] read[t]``; returns y
    and the last h.

    ``x``, ``step``: ``[B, T, D]``; ``decay``: ``[D, N]``; ``write``, ``read``: ``[B, T, N]``; ``memory``:
    ``[B, D, N]``;
    ``begins``: bool ``[B, T]``, where nothing before is seen.
    """
    out: tuple[Tensor, Tensor] = _SelectiveScan.apply(x, step, decay, write, read, memory, begins)
    return out
