"""Recurrences of single numbers, as a loop over positions with its own backward: HGRN's and Mamba's.

Shapes: B batch, T positions, D width, N numbers that Mamba keeps for each channel.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.parts import Memory, Reach, at_least_float32, full_precision, starting_memory


def _positions(x: Tensor) -> range:
    """Return the positions of ``x``, ``[B, T, D]``; none for meta and fake tensors, which hold no values."""
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
def scan(keep: Tensor, add: Tensor, memory: Memory = None, reach: Reach = None) -> tuple[Tensor, Tensor]:
    """Compute ``h[t] = keep[t] * h[t-1] + add[t]``.

    Args:
        keep, add: ``[B, T, D]``.
        memory: h before the first position, ``[B, D]``.

    Returns:
        All h, ``[B, T, D]``, and the last h, ``[B, D]``.
    """
    memory = starting_memory(memory, add[:, 0])
    if kernels.usable(keep, reach):
        states = kernels.scan(keep, add, memory)
    else:
        keep = keep if reach is None else keep.masked_fill((reach < 2)[:, :, None], 0)
        states = _Scan.apply(keep, add, memory)
    return states, states[:, -1].clone()  # a view would keep all states alive


class _SelectiveScan(torch.autograd.Function):
    """Saves the states ``[T, B, D, N]`` for the backward, which computes the decays again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, step, decay, write, read, memory, begins = inputs
        states = x.new_empty(x.shape[1], *memory.shape)
        out = torch.empty_like(x)
        current, scaled = memory, step * x
        for t in _positions(x):
            keep = _keep(step, decay, begins, t)
            torch.mul(scaled[:, t, :, None], write[:, t, None, :], out=states[t])
            current = states[t].addcmul_(keep, current)
            torch.matmul(current, read[:, t, :, None], out=out[:, t, :, None])
        ctx.save_for_backward(*inputs, states)
        return out, current.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        x, step, decay, write, read, memory, begins, states = ctx.saved_tensors
        grad_scaled, grad_step, grad_write, grad_read = map(torch.empty_like, (x, step, write, read))
        grad_decay = torch.zeros_like(decay)
        scaled, grad = step * x, grad_last.clone()
        for t in range(x.shape[1] - 1, -1, -1):
            grad.addcmul_(grad_out[:, t, :, None], read[:, t, None, :])  # now the gradient of state t
            torch.matmul(states[t].mT, grad_out[:, t, :, None], out=grad_read[:, t, :, None])
            torch.matmul(grad, write[:, t, :, None], out=grad_scaled[:, t, :, None])
            torch.matmul(grad.mT, scaled[:, t, :, None], out=grad_write[:, t, :, None])
            grad.mul_(_keep(step, decay, begins, t))
            exponent = grad * (states[t - 1] if t > 0 else memory)  # gradient of step * decay
            torch.sum(exponent * decay, dim=-1, out=grad_step[:, t])
            grad_decay += (exponent * step[:, t, :, None]).sum(0)
        return grad_scaled * step, grad_step + grad_scaled * x, grad_decay, grad_write, grad_read, grad, None


def _keep(step: Tensor, decay: Tensor, begins: Tensor | None, t: int) -> Tensor:
    """Return how much of its numbers each channel keeps at position t, ``[B, D, N]``."""
    keep = (step[:, t, :, None] * decay).exp_()
    return keep if begins is None else keep.masked_fill_(begins[:, t, None, None], 0)


@full_precision
def selective_scan(
    x: Tensor, step: Tensor, decay: Tensor, write: Tensor, read: Tensor, memory: Memory, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Compute ``h[t] = exp(step[t] * decay) * h[t-1] + step[t] x[t] write[t]'`` and ``y[t] = h[t] read[t]``.

    Args:
        x, step: ``[B, T, D]``.
        decay: ``[D, N]``.
        write, read: ``[B, T, N]``.
        memory: h before the first position, ``[B, D, N]``.

    Returns:
        All y, ``[B, T, D]``, and the last h, ``[B, D, N]``.
    """
    x, step, decay, write, read = (at_least_float32(y) for y in (x, step, decay, write, read))
    memory = starting_memory(memory, decay.expand(x.shape[0], -1, -1))
    return _SelectiveScan.apply(x, step, decay, write, read, memory, None if reach is None else reach < 2)
