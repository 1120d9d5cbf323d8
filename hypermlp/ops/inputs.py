"""Inputs of the operator for checks and tests: random tensors, and which keys the queries see.

Shapes: B batch, Tq queries, Tk keys.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops.arguments import Mix

PATTERNS = ("all", "padding", "packed", "window", "nothing")


class OpInputs(NamedTuple):
    """The tensors that ``hyper_attention`` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    mix1: Mix | None
    mix2: Mix | None

    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *(self.mix1 or ()), *(self.mix2 or ())]

    def to(self, dtype: torch.dtype) -> "OpInputs":
        """Return detached copies in another dtype."""
        q, k, v = (x.detach().to(dtype, copy=True) for x in (self.q, self.k, self.v))
        mix1, mix2 = (
            mix and Mix(*(x.detach().to(dtype, copy=True) for x in mix)) for mix in (self.mix1, self.mix2)
        )
        return OpInputs(q, k, v, mix1, mix2)

    def requires_grad(self) -> Self:
        for x in self.tensors():
            x.requires_grad_()
        return self


def op_inputs(
    *,
    batch: int = 2,
    queries: int = 9,
    keys: int | None = None,
    heads: int = 2,
    qk_dim: int = 4,
    vo_dim: int = 5,
    slots: int | None = None,
    rank: int = 3,
    activation: str = "glu",
    mixes: str = "12",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> OpInputs:
    """Return random inputs like those of a trained layer: scores of order one, and mixes with large effects.

    Args:
        batch, queries, heads, qk_dim, vo_dim, rank: the sizes.
        keys: number of keys, at least ``queries`` (None: as many as queries).
        slots: number of slots that the mixes have, at least ``keys`` (None: as many as keys).
        activation: "glu" gives q, k and the first mix two branches for each head.
        mixes: which mixes to make: "", "1", "2" or "12".
        dtype, device, seed: of the tensors and of the random numbers, which are drawn in float64 on the CPU.

    Returns:
        an ``OpInputs`` (q, k, v, mix1, mix2), to be passed on as ``hyper_attention(*inputs,
        activation=activation)``.

    Example::

        from hypermlp.ops import hyper_attention
        from hypermlp.testing import assert_close, op_inputs

        inputs = op_inputs(queries=7, keys=12)
        expected = hyper_attention(*inputs, backend="reference")
        assert_close(hyper_attention(*inputs, backend="blocked"), expected, tolerance=1e-10)
    """
    if mixes not in ("", "1", "2", "12"):
        raise UserError(f"mixes is {mixes!r}; it must be '', '1', '2' or '12'")
    keys = queries if keys is None else keys
    slots = keys if slots is None else slots
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * heads if activation == "glu" else heads

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype)

    def mix(count: int) -> Mix:
        left, right = (normal(count, slots, rank, scale=0.3) for _ in range(2))
        return Mix(
            normal(count, slots, scale=0.3), left, right, torch.sigmoid(normal(batch, queries, count, rank))
        )

    return OpInputs(
        normal(batch, queries, branches, qk_dim, scale=qk_dim**-0.5),
        normal(batch, keys, branches, qk_dim),
        normal(batch, keys, heads, vo_dim),
        mix(branches) if "1" in mixes else None,
        mix(heads) if "2" in mixes else None,
    )


def starts_of(pattern: str, *, batch: int, queries: int, keys: int) -> Tensor | None:
    """Return the first visible positions ``[B, Tq]`` of a pattern; None if all positions are visible.

    Patterns: everything; padding on the left; packed documents; a window of 5; nothing.
    """
    position = torch.arange(keys - queries, keys)
    item = torch.arange(batch)[:, None]
    found = {
        "all": None,
        "padding": (3 * item).clamp(max=keys).minimum(position + 1),
        "packed": position // (4 + item) * (4 + item),
        "window": (position - 4).clamp(min=0).expand(batch, -1),
        "nothing": (position + 1).expand(batch, -1),
    }
    return found[pattern]
