"""The operators' place in ``torch.library``: schema, fake, autograd, autocast, the same for every backend.

Kernels see float tensors that are already validated. A backend in Python hands its kernels over; those of ``native`` register
themselves when their library is loaded. A second derivative is refused with a message instead of being silently wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hypermlp.ops.types import Mix

# (q, k, v, mix1, mix2, starts, activation, layout, eps) -> out, 1/rho
Forward = Callable[
    [Tensor, Tensor, Tensor, Mix | None, Mix | None, Tensor | None, str, str, float], tuple[Tensor, Tensor]
]
# (grad_out, the forward's arguments up to starts, 1/rho, activation, layout, eps) -> a gradient for each tensor up to starts
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Mix | None, Mix | None, Tensor | None, Tensor, str, str, float],
    list[Tensor],
]
Operator = Callable[..., Any]

MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in Mix._fields)
SCHEMA = f"(Tensor q, Tensor k, Tensor v, {MIXES}, Tensor? starts, str activation, str layout, float eps) -> (Tensor, Tensor)"
BACKWARD_SCHEMA = (
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, {MIXES}, Tensor? starts, Tensor inverse_norm, "
    "str activation, str layout, float eps) -> Tensor[]"
)
DOUBLE_BACKWARD = (
    "hyper_attention has no second derivative in backend {name!r}: gradients of its gradients cannot be computed. "
    "Pass backend='reference', which is differentiable any number of times (and dense: memory grows with Tq * Tk)."
)


def define(name: str, schema: str, fake: Operator) -> Operator:
    """``hypermlp::{name}``, without kernels."""
    torch.library.define(f"hypermlp::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"hypermlp::{name}", fake)
    operator: Operator = getattr(torch.ops.hypermlp, name).default
    return operator


def differentiate(name: str, backward: Operator, setup_context: Operator, no_second_derivative: str) -> None:
    """Gradients of ``hypermlp::{name}``, which call ``hypermlp::{name}_backward``; that one has none."""

    def refuse(ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(no_second_derivative)

    torch.library.register_autograd(f"hypermlp::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"hypermlp::{name}_backward", refuse)


def call(operator: Operator, *arguments: Any) -> Any:
    """Call it; where no gradient can flow past autograd's bookkeeping, which costs more than a small step of decoding."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def in_transform() -> bool:
    """Is forward mode on, or a transform of torch.func?"""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(what: str) -> None:
    """PyTorch gives an operator without a rule for it a zero tangent, silently; and torch.func.grad says what it misses, not of whom."""
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{what} has no forward-mode derivative (torch.func.jvp, dual numbers); backend='reference' has"
        )
    if torch.compiler.is_compiling():
        return
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
        raise RuntimeError(
            f"{what} cannot be differentiated by torch.func (grad, vjp, jacrev); use torch.autograd, or backend='reference'"
        )


def _fake(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads = q.shape[0], q.shape[1], v.shape[2]
    inverse_norm = q.new_empty(heads * batch, queries, 1, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(batch, queries, heads, v.shape[3]), inverse_norm


def _fake_backward(grad_out: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[:11] if x is not None]


def _mix(diag: Tensor | None, left: Tensor | None, right: Tensor | None, gate: Tensor | None) -> Mix | None:
    return (
        None
        if diag is None or left is None or right is None or gate is None
        else Mix(diag, left, right, gate)
    )


def register_kernels(
    name: str, forward: Forward | None = None, backward: Backward | None = None
) -> Callable[..., Tensor]:
    """Register ``hypermlp::{name}`` and ``hypermlp::{name}_backward``; returns a function with the signature of a backend.

    Kernels in Python run with autocast off: they choose their own precision.
    """
    forward_op = define(name, SCHEMA, _fake)
    backward_op = define(f"{name}_backward", BACKWARD_SCHEMA, _fake_backward)
    if forward is not None:

        def forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            with torch.autocast(q.device.type, enabled=False):
                return forward(q, k, v, _mix(*rest[:4]), _mix(*rest[4:8]), *rest[8:])

        torch.library.impl(f"hypermlp::{name}", "default", forward_kernel)
    if backward is not None:

        def backward_kernel(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
            with torch.autocast(q.device.type, enabled=False):
                return backward(grad_out, q, k, v, _mix(*rest[:4]), _mix(*rest[4:8]), *rest[8:])

        torch.library.impl(f"hypermlp::{name}_backward", "default", backward_kernel)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings = inputs[12:]
        ctx.save_for_backward(*inputs[:12], output[1])
        ctx.set_materialize_grads(True)

    def run_backward(ctx: Any, grad_out: Tensor, _grad_inverse_norm: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = iter(backward_op(grad_out, *inputs, *ctx.settings))
        return *(None if x is None else next(grads) for x in inputs[:11]), None, None, None, None

    differentiate(name, run_backward, setup_context, DOUBLE_BACKWARD.format(name=name))

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
        refuse_transforms("hyper_attention in backend " + repr(name))
        none = (None, None, None, None)
        out: Tensor = call(
            forward_op, q, k, v, *(mix1 or none), *(mix2 or none), starts, activation, layout, eps
        )[0]
        return out

    return run
