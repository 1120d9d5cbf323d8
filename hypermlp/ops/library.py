"""Registration of operators with ``torch.library``: schema, fake, autograd and autocast, the same for every
operator and backend.

Kernels receive tensors that are already validated. A backend in Python passes its kernels to ``register``;
the kernels of ``native`` register themselves when their library is loaded. A second derivative is refused
with a message instead of being silently wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hypermlp.ops.arguments import Attention, schema

Forward = Callable[[Attention], tuple[Tensor, Tensor]]
"""Return the output ``[B, Tq, H, Dv]`` and 1/rho ``[H * B, Tq, 1]``."""
Backward = Callable[..., list[Tensor]]
"""Return a gradient for each present tensor, from the gradient of the output, 1/rho and the arguments. A
backend that keeps its output receives it before 1/rho."""
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


def flat(values: Any) -> Iterator[Any]:
    """Yield the values, and those of lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


def float_tensors(values: Any) -> list[Tensor]:
    """Return the tensors that may have a gradient, in order."""
    return [x for x in flat(values) if isinstance(x, Tensor) and x.is_floating_point()]


def register(
    name: str,
    arguments: str,
    returns: str,
    fake: Operator,
    *,
    what: str,
    outputs: int | None = None,
    keeps_outputs: bool = False,
    kernel: Operator | None = None,
    gradient_kernel: Operator | None = None,
) -> Operator:
    """Define ``hypermlp::{name}`` and its gradient, and return a function that calls the operator.

    The gradient ``hypermlp::{name}_gradients`` takes the gradients of the outputs and what was kept, each as
    a list, then the arguments of the operator. It returns a gradient for each float tensor among these.

    Args:
        arguments: as in a schema, without parentheses.
        returns: the right side of the schema.
        fake: returns empty results.
        what: names the operator in messages.
        outputs: how many results are outputs; the others are kept for the gradient. None if all are outputs.
        keeps_outputs: whether the outputs are kept too, before the others.
        kernel: the operator in Python; it runs with autocast off. None if a library registers the kernels.
        gradient_kernel: the gradient in Python.
    """
    operator = define(name, f"({arguments}) -> {returns}", fake)

    def fake_gradients(grads: list[Tensor], kept: list[Tensor], *inputs: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in float_tensors(inputs)]

    schema = f"(Tensor[] grads, Tensor[] kept, {arguments}) -> Tensor[]"
    gradients = define(f"{name}_gradients", schema, fake_gradients)
    for suffix, run_kernel in (("", kernel), ("_gradients", gradient_kernel)):
        if run_kernel is not None:
            torch.library.impl(f"hypermlp::{name}{suffix}", "default", _without_autocast(run_kernel))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = list(flat([output]))
        count = len(results) if outputs is None else outputs
        kept = results if keeps_outputs else results[count:]
        ctx.outputs = [(x.shape, x.dtype, x.device) for x in results[:count]]
        ctx.kept, ctx.inputs = len(kept), [_emptied(value) for value in inputs]
        ctx.save_for_backward(*kept, *(x for x in flat(inputs) if isinstance(x, Tensor)))
        ctx.mark_non_differentiable(*results[count:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them
        tensors = iter(saved[ctx.kept :])
        inputs = [_refilled(value, tensors) for value in ctx.inputs]
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(flat(grads), ctx.outputs, strict=False)
        ]
        found = iter(gradients(given, list(saved[: ctx.kept]), *inputs))
        return tuple(_gradient_of(value, found) for value in inputs)

    def refuse(ctx: Any, *_grads: Any) -> None:
        raise RuntimeError(SECOND_DERIVATIVE.format(what=what))

    torch.library.register_autograd(f"hypermlp::{name}", backward, setup_context=save)
    torch.library.register_autograd(f"hypermlp::{name}_gradients", refuse)

    def run(*inputs: Any) -> Any:
        refuse_transforms(what)
        return call(operator, *inputs)

    return run


def _without_autocast(kernel: Operator) -> Operator:
    """Wrap a Python kernel, which chooses its own precision, so that autocast is off."""

    def run(*inputs: Any) -> Any:
        device = next(x.device.type for x in flat(inputs) if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return kernel(*inputs)

    return run


_TENSOR = object()  # stands for a tensor that autograd saves


def _emptied(value: Any) -> Any:
    """Return an argument with _TENSOR in the place of tensors."""
    if isinstance(value, list | tuple):
        return [_emptied(item) for item in value]
    return _TENSOR if isinstance(value, Tensor) else value


def _refilled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Invert ``_emptied``."""
    if isinstance(value, list):
        return [_refilled(item, tensors) for item in value]
    return next(tensors) if value is _TENSOR else value


def _gradient_of(value: Any, found: Iterator[Tensor]) -> Any:
    """Return the next gradients in the form of an argument; None for what has none."""
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        return [_gradient_of(item, found) for item in value]
    return next(found) if isinstance(value, Tensor) and value.is_floating_point() else None


def call(operator: Operator, *arguments: Any) -> Any:
    """Call an operator. Skip the autograd dispatch key when grad is off: it costs more than a decode step."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def in_transform() -> bool:
    """Return True inside forward-mode differentiation or a transform of ``torch.func``."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def in_vmap() -> bool:
    """Return True inside ``torch.vmap`` that no other transform encloses more closely."""
    if torch.compiler.is_compiling():
        return False
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Vmap


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
    """Register the operator as ``hypermlp::{name}`` and return the function that a backend runs.

    Without ``forward`` and ``backward`` the kernels are expected to register themselves. The forward returns
    the output and a tensor like the empty one that ``kept`` returns; the backward receives this tensor, after
    the output if ``keeps_output``.
    """

    def fake(*inputs: Any) -> tuple[Tensor, Tensor]:
        arguments = Attention.unflatten(inputs)
        q, v = arguments.q, arguments.v
        return q.new_empty(*q.shape[:2], *v.shape[2:]), kept(arguments)

    operator = register(
        name,
        schema(Attention),
        "(Tensor, Tensor)",
        fake,
        what=f"hyper_attention in backend {name!r}",
        outputs=1,
        keeps_outputs=keeps_output,
        kernel=forward and (lambda *inputs: forward(Attention.unflatten(inputs))),
        gradient_kernel=backward
        and (lambda grads, kept, *inputs: backward(*grads, *kept, Attention.unflatten(inputs))),
    )

    def run(arguments: Attention) -> Tensor:
        out: Tensor = operator(*arguments.flatten())[0]
        return out

    return run
