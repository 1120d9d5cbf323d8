"""The arguments of the operator as one value, and the schemas of operators from such values.

Shapes: B batch, Tq queries, Tk keys, H heads, Hq score branches (H, or 2 H for "glu"), Dk, Dv widths, L
slots, r rank.
"""

from typing import Any, NamedTuple, Self, get_type_hints

import torch
from torch import Tensor


class Mix(NamedTuple):
    """One diagonal-plus-low-rank mix along the sequence, ``R = I + Diag(diag) + left Diag(gate) rightᵀ``.

    Letters: H heads, L slots, r rank, B sequences, Tq queries. In the first mix of "glu", the dimension H of
    all four tensors is twice the number of heads: one entry for each branch, first all gates, then all
    scales. Slots count from 0: row ``i`` of ``diag``, ``left`` and ``right`` belongs to lag ``i`` in layout
    "lag" (0 is the query itself), to the ``i``-th visible position in layout "forward". A query that sees n
    keys uses rows 0 to n - 1, so its R is ``[n, n]``; L may be larger than any n.

    Attributes:
        diag: ``[H, L]``.
        left: ``[H, L, r]``.
        right: ``[H, L, r]``.
        gate: ``[B, Tq, H, r]``, used as it is; the layers pass a sigmoid of their input.

    Example::

        import torch
        from hypermlp.ops import Mix

        H, L, r, B, Tq = 2, 128, 8, 1, 10
        mix = Mix(torch.zeros(H, L), torch.randn(H, L, r), torch.randn(H, L, r), torch.rand(B, Tq, H, r))
    """

    diag: Tensor
    left: Tensor
    right: Tensor
    gate: Tensor


NO_MIX = (None, None, None, None)


class Attention(NamedTuple):
    """The checked arguments of one call of ``hyper_attention``, without the backend."""

    q: Tensor  # [B, Tq, Hq, Dk]
    k: Tensor  # [B, Tk, Hq, Dk]
    v: Tensor  # [B, Tk, H, Dv]
    mix1: Mix | None
    mix2: Mix | None
    starts: Tensor | None  # int64 [B, Tq], from ``layout.row_starts``
    activation: str
    layout: str
    eps: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that may need a gradient, None for absent ones.

        They are q, k, v and the fields of both mixes.
        """
        return (self.q, self.k, self.v, *(self.mix1 or NO_MIX), *(self.mix2 or NO_MIX))

    def flatten(self) -> tuple[Any, ...]:
        """Return the arguments in the order of ``schema(Attention)``."""
        return (*self.tensors(), self.starts, self.activation, self.layout, self.eps)

    @classmethod
    def unflatten(cls, flat: tuple[Any, ...]) -> Self:
        """Invert ``flatten``."""
        q, k, v, *mixes, starts, activation, layout, eps = flat
        mix1, mix2 = (None if mix[0] is None else Mix(*mix) for mix in (mixes[:4], mixes[4:]))
        return cls(q, k, v, mix1, mix2, starts, activation, layout, eps)


class Request(NamedTuple):
    """What is to be computed, as far as the choice of a backend depends on it."""

    operation: str
    """"attention" (the operator), "ring" (the operator over keys in a ring), "convolution" (causal
    convolutions), "gating" (a layer's gates), "layer" (a whole layer), "step" (a layer's decoding step) or
    "ring_step" (the step on a state of fixed size).
    """
    device_type: str
    dtype: torch.dtype
    activation: str = ""
    """"relu", "glu" or "softmax"; empty for the convolution."""
    mixed: bool = False
    """Whether there is a sequence mix."""


SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    int: "SymInt",
    bool: "bool",
    float: "float",
    str: "str",
}


def schema(kind: type, *, written: tuple[str, ...] = ()) -> str:
    """Return the arguments of an operator's schema from a NamedTuple, whose nested values are flattened.

    ``written`` names the tensors that the operator writes in place.
    """
    parts = []
    for name, hint in get_type_hints(kind).items():
        if hint == Mix | None:
            parts += [f"Tensor? {field}{name.removeprefix('mix')}" for field in Mix._fields]
        elif hint in SCHEMA_TYPES:
            alias = f"({chr(ord('a') + written.index(name))}!)" if name in written else ""
            parts.append(f"{SCHEMA_TYPES[hint].replace('Tensor', 'Tensor' + alias)} {name}")
        else:
            parts.append(schema(hint, written=written))
    return ", ".join(parts)
