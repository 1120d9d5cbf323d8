"""Gives a pair of kernels, forward and backward, a place in ``torch.library``: schema, fake, autograd, autocast.

Both kernels see float tensors that are already validated. Under autocast they run with autocast off, since they choose
their own precision; a second derivative is refused with a message instead of being silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hypermlp.ops.types import Mix

# (q, k, v, mix1, mix2, starts, activation, layout, eps) -> out, 1/rho
Forward = Callable[[Tensor, Tensor, Tensor, Mix | None, Mix | None, Tensor | None, str, str, float], tuple[Tensor, Tensor]]
# (grad_out, the forward's arguments up to starts, 1/rho, activation, layout, eps) -> a gradient for each tensor up to starts
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Mix | None, Mix | None, Tensor | None, Tensor, str, str, float], list[Tensor]]

DOUBLE_BACKWARD = (
    "hyper_attention has no second derivative in backend {name!r}: gradients of its gradients cannot be computed. "
    "Pass backend='reference', which is differentiable any number of times (and dense: memory grows with Tq * Tk)."
)


def _mix(diag: Tensor | None, left: Tensor | None, right: Tensor | None, gate: Tensor | None) -> Mix | None:
    return None if diag is None or left is None or right is None or gate is None else Mix(diag, left, right, gate)


def refuse_forward_mode(what: str) -> None:
    """PyTorch gives an operator without a rule for it a zero tangent, silently."""
    if forward_ad._current_level >= 0:
        raise RuntimeError(f"{what} has no forward-mode derivative (torch.func.jvp, dual numbers); backend='reference' has")


def register_kernels(name: str, forward: Forward, backward: Backward) -> Callable[..., Tensor]:
    """Register ``hypermlp::{name}`` and ``hypermlp::{name}_backward``; returns a function with the signature of a backend."""

    @torch.library.custom_op(f"hypermlp::{name}", mutates_args=())
    def forward_op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        diag1: Tensor | None,
        left1: Tensor | None,
        right1: Tensor | None,
        gate1: Tensor | None,
        diag2: Tensor | None,
        left2: Tensor | None,
        right2: Tensor | None,
        gate2: Tensor | None,
        starts: Tensor | None,
        activation: str,
        layout: str,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        mix1, mix2 = _mix(diag1, left1, right1, gate1), _mix(diag2, left2, right2, gate2)
        with torch.autocast(q.device.type, enabled=False):
            return forward(q, k, v, mix1, mix2, starts, activation, layout, eps)

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
        batch, queries, heads = q.shape[0], q.shape[1], v.shape[2]
        inverse_norm = q.new_empty(heads * batch, queries, 1, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty(batch, queries, heads, v.shape[3]), inverse_norm

    @torch.library.custom_op(f"hypermlp::{name}_backward", mutates_args=())
    def backward_op(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        diag1: Tensor | None,
        left1: Tensor | None,
        right1: Tensor | None,
        gate1: Tensor | None,
        diag2: Tensor | None,
        left2: Tensor | None,
        right2: Tensor | None,
        gate2: Tensor | None,
        starts: Tensor | None,
        inverse_norm: Tensor,
        activation: str,
        layout: str,
        eps: float,
    ) -> list[Tensor]:
        mix1, mix2 = _mix(diag1, left1, right1, gate1), _mix(diag2, left2, right2, gate2)
        with torch.autocast(q.device.type, enabled=False):
            return backward(grad_out, q, k, v, mix1, mix2, starts, inverse_norm, activation, layout, eps)

    @backward_op.register_fake
    def _(grad_out: Tensor, *inputs: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in inputs[:11] if x is not None]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings = inputs[12:]
        ctx.save_for_backward(*inputs[:12], output[1])
        ctx.set_materialize_grads(True)

    def run_backward(ctx: Any, grad_out: Tensor, _grad_inverse_norm: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = iter(backward_op(grad_out, *inputs, *ctx.settings))
        return *(None if x is None else next(grads) for x in inputs[:11]), None, None, None, None

    def refuse(ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(DOUBLE_BACKWARD.format(name=name))

    forward_op.register_autograd(run_backward, setup_context=setup_context)
    backward_op.register_autograd(refuse)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mix1: Mix | None,
        mix2: Mix | None,
        starts: Tensor | None,
        *,
        activation: str,
        layout: str,
        eps: float,
    ) -> Tensor:
        refuse_forward_mode("hyper_attention in backend " + repr(name))
        none = (None, None, None, None)
        out, _ = forward_op(q, k, v, *(mix1 or none), *(mix2 or none), starts, activation, layout, eps)
        return out

    return run
