"""Registration of operators with ``torch.library``: schema, fake, autograd and autocast, the same for every
backend.

Kernels receive float tensors that are already validated. A backend in Python passes its kernels to
``register_attention``; the kernels of ``native`` register themselves when their library is loaded. A second
derivative is refused with a message instead of being silently wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hypermlp.ops.arguments import FLAT_SCHEMA, Attention

Forward = Callable[[Attention], tuple[Tensor, Tensor]]
"""Return the output ``[B, Tq, H, Dv]`` and 1/rho ``[H * B, Tq, 1]``."""
Backward = Callable[..., list[Tensor]]
"""Return a gradient for each present tensor, from the gradient of the output, 1/rho and the arguments. A
backend that keeps its output gets it before 1/rho."""
Operator = Callable[..., Any]

SECOND_DERIVATIVE = (
    "{what} has no second derivative: gradients of its gradients cannot be computed. Pass "
    "backend='reference', "
    "which is differentiable any number of times (and dense: its memory grows with Tq * Tk)."
)


def define(name: str, schema: str, fake: Operator) -> Operator:
    """Define ``hypermlp::{name}`` without kernels and return the operator.

    ``fake`` returns empty results. PyTorch runs it as soon as one tensor is on the meta device, so tensors on
    several devices are refused.
    """

    def checked_fake(*arguments: Any) -> Any:
        devices = {str(x.device) for x in arguments if isinstance(x, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(
                f"hypermlp::{name} has tensors on {', '.join(sorted(devices))}; move them to one device"
            )
        return fake(*arguments)

    torch.library.define(f"hypermlp::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"hypermlp::{name}", checked_fake)
    operator: Operator = getattr(torch.ops.hypermlp, name).default
    return operator


def differentiate(name: str, gradient: str, what: str, backward: Operator, setup_context: Operator) -> None:
    """Register the gradients of ``hypermlp::{name}``; the operator ``hypermlp::{gradient}`` itself has none.

    ``what`` names the operator in the message for second derivatives.
    """

    def refuse(ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(SECOND_DERIVATIVE.format(what=what))

    torch.library.register_autograd(f"hypermlp::{name}", backward, setup_context=setup_context)
    torch.library.register_autograd(f"hypermlp::{gradient}", refuse)


def call(operator: Operator, *arguments: Any) -> Any:
    """Call an operator. Skip the autograd dispatch key when grad is off: it costs more than a decode step."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def in_transform() -> bool:
    """Return True inside forward-mode differentiation or a transform of ``torch.func``."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transforms(what: str) -> None:
    """Raise inside transforms that our operators do not support.

    PyTorch would silently give the operator a zero tangent in forward mode, and the error of
    ``torch.func.grad`` does not name the operator.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{what} has no forward-mode derivative (torch.func.jvp, dual numbers); use backend='reference'"
        )
    if torch.compiler.is_compiling():
        return
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
        raise RuntimeError(
            f"{what} cannot be differentiated by torch.func (grad, vjp, jacrev); use torch.autograd, "
            "or backend='reference'"
        )


def inverse_norms(arguments: Attention) -> Tensor:
    """Return an empty tensor for 1/rho of every row, ``[H * B, Tq, 1]``, in float32 or better."""
    q, v = arguments.q, arguments.v
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(v.shape[2] * q.shape[0], q.shape[1], 1, dtype=dtype)


def register_attention(
    name: str,
    forward: Forward | None = None,
    backward: Backward | None = None,
    *,
    kept: Callable[[Attention], Tensor] = inverse_norms,
    keeps_output: bool = False,
) -> Callable[[Attention], Tensor]:
    """Register ``hypermlp::{name}`` and ``hypermlp::{name}_grad``; return the function that a backend
    runs.

    Kernels in Python run with autocast off: they choose their own precision. Without ``forward`` and
    ``backward`` the kernels are expected to register themselves. The forward returns the output and a tensor
    like the empty one that ``kept`` returns; the backward gets this tensor, after the output if
    ``keeps_output``.
    """
    what = f"hyper_attention in backend {name!r}"
    given_names = ("Tensor out", "Tensor kept") if keeps_output else ("Tensor kept",)
    count = len(given_names)

    def fake(*flat: Any) -> tuple[Tensor, Tensor]:
        arguments = Attention.unflatten(flat)
        q, v = arguments.q, arguments.v
        return q.new_empty(*q.shape[:2], *v.shape[2:]), kept(arguments)

    def fake_backward(*inputs: Any) -> list[Tensor]:
        tensors = Attention.unflatten(inputs[1 + count :]).tensors()
        return [x.new_empty(x.shape) for x in tensors if x is not None]

    forward_op = define(name, f"({FLAT_SCHEMA}) -> (Tensor, Tensor)", fake)
    backward_schema = f"(Tensor grad_out, {', '.join(given_names)}, {FLAT_SCHEMA}) -> Tensor[]"
    backward_op = define(f"{name}_grad", backward_schema, fake_backward)
    if forward is not None and backward is not None:

        def forward_kernel(*flat: Any) -> tuple[Tensor, Tensor]:
            with torch.autocast(flat[0].device.type, enabled=False):
                return forward(Attention.unflatten(flat))

        def backward_kernel(*inputs: Any) -> list[Tensor]:
            given, flat = inputs[: 1 + count], inputs[1 + count :]
            with torch.autocast(given[0].device.type, enabled=False):
                return backward(*given, Attention.unflatten(flat))

        torch.library.impl(f"hypermlp::{name}", "default", forward_kernel)
        torch.library.impl(f"hypermlp::{name}_grad", "default", backward_kernel)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        arguments = Attention.unflatten(inputs)
        ctx.settings = arguments.activation, arguments.layout, arguments.eps
        ctx.save_for_backward(*output[-count:], *arguments.tensors(), arguments.starts)
        ctx.set_materialize_grads(True)

    def run_backward(ctx: Any, grad_out: Tensor, _grad_saved: Tensor) -> tuple[Tensor | None, ...]:
        kept_tensors = ctx.saved_tensors  # read once: activation checkpointing recomputes them
        given, tensors = kept_tensors[:count], kept_tensors[count:]
        flat = (*tensors, *ctx.settings)
        grads = iter(backward_op(grad_out, *given, *flat))
        present = (None if x is None else next(grads) for x in Attention.unflatten(flat).tensors())
        return *present, None, None, None, None  # starts, activation, layout and eps have no gradient

    differentiate(name, f"{name}_grad", what, run_backward, setup_context)

    def run(arguments: Attention) -> Tensor:
        refuse_transforms(what)
        out: Tensor = call(forward_op, *arguments.flatten())[0]
        return out

    return run
