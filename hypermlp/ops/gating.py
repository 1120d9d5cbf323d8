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

from hypermlp.ops.library import register


class Gating(NamedTuple):
    """How a backend computes the gates."""

    gate_queries: Callable[[Tensor, Tensor, list[int]], list[Tensor]]
    """Return the gated queries and the other three gates, from logits ``[..., W]``, queries
    ``[..., sizes[0]]`` and the numbers of columns of the gates of the query, the output and both mixes (0 for
    an absent one)."""
    gate_output: Callable[[Tensor, Tensor], Tensor]
    """Return the product of two tensors of one shape."""


def _fake_gates(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    return [q.new_empty(*q.shape[:-1], size) for size in sizes]


def _gates(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import gates

    return gates(logits, q, sizes)


def _gates_gradients(grads: list[Tensor], _kept: list[Tensor], *arguments: Any) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import gates_grad

    return gates_grad(grads, *arguments)


def _product_gradients(grads: list[Tensor], _kept: list[Tensor], a: Tensor, b: Tensor) -> list[Tensor]:
    from hypermlp.ops.triton.elementwise import product_grad

    return product_grad(grads[0], a, b)


_WHAT = "the gates of a layer in backend 'triton'"
triton_gating = Gating(
    register(
        "triton_gates",
        "Tensor logits, Tensor q, int[] sizes",
        "Tensor[]",
        _fake_gates,
        what=_WHAT,
        kernel=_gates,
        gradient_kernel=_gates_gradients,
    ),
    register(
        "triton_product",
        "Tensor a, Tensor b",
        "Tensor",
        lambda a, b: a.new_empty(a.shape),
        what=_WHAT,
        kernel=torch.mul,
        gradient_kernel=_product_gradients,
    ),
)
