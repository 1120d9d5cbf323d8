"""The sigmoid gates of a layer as two operators, for backends that fuse them.

``gate_queries`` takes the logits of all gates and returns the gated queries and the other gates, each a
tensor of its own; ``gate_output`` multiplies the operator's output. In plain PyTorch that is a chain of small
operations, each of which reads and writes everything again.

Shapes: ... positions, W columns of logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.library import call, define, differentiate, refuse_transforms


class Gating(NamedTuple):
    """How a backend computes the gates."""

    gate_queries: Callable[[Tensor, Tensor, list[int]], list[Tensor]]
    """Return the gated queries and the other three gates, from logits ``[..., W]``, queries
    ``[..., sizes[0]]`` and the numbers of columns of the gates of the query, the output and both mixes (0 for
    an absent one)."""
    gate_output: Callable[[Tensor, Tensor], Tensor]
    """Return the product of two tensors of one shape."""


def _fake(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    return [q.new_empty(*q.shape[:-1], size) for size in sizes]


def _fake_grad(grads: list[Tensor], logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (logits, q)]


def _gates(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import gates

    return gates(logits, q, sizes)


def _gates_grad(grads: list[Tensor], logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import gates_grad

    return gates_grad(grads, logits, q, sizes)


def _product_grad(grad: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import product_grad

    return product_grad(grad, a, b)


_WHAT = "the gates of a layer in backend 'triton'"
_gates_op = define("triton_gates", "(Tensor logits, Tensor q, int[] sizes) -> Tensor[]", _fake)
_gates_grad_op = define(
    "triton_gates_grad", "(Tensor[] grads, Tensor logits, Tensor q, int[] sizes) -> Tensor[]", _fake_grad
)
_product_op = define("triton_product", "(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape))
_product_grad_op = define(
    "triton_product_grad",
    "(Tensor grad, Tensor a, Tensor b) -> Tensor[]",
    lambda grad, a, b: [x.new_empty(x.shape) for x in (a, b)],
)
torch.library.impl("hypermlp::triton_gates", "default", _gates)
torch.library.impl("hypermlp::triton_gates_grad", "default", _gates_grad)
torch.library.impl("hypermlp::triton_product", "default", lambda a, b: torch.mul(a, b))
torch.library.impl("hypermlp::triton_product_grad", "default", _product_grad)


def _save_gates(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, q, ctx.sizes = inputs
    ctx.save_for_backward(logits, q)
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _gates_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    logits, q = ctx.saved_tensors
    given = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    grad_logits, grad_q = _gates_grad_op(given, logits, q, ctx.sizes)
    return grad_logits, grad_q, None


def _save_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(_product_grad_op(grad, *ctx.saved_tensors))


differentiate("triton_gates", "triton_gates_grad", _WHAT, _gates_backward, _save_gates)
differentiate("triton_product", "triton_product_grad", _WHAT, _product_backward, _save_product)


def _triton_gate_queries(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    refuse_transforms(_WHAT)
    found: list[Tensor] = call(_gates_op, logits, q, sizes)
    return found


def _triton_gate_output(o: Tensor, gate: Tensor) -> Tensor:
    out: Tensor = call(_product_op, o, gate)
    return out


triton_gating = Gating(_triton_gate_queries, _triton_gate_output)
