"""The data that describe one sequence mix."""

from typing import NamedTuple

from torch import Tensor


class Mix(NamedTuple):
    """One diagonal-plus-low-rank mix along the sequence, ``R = I + Diag(diag) + left Diag(gate) rightᵀ``.

    Row ``i`` of ``diag``, ``left`` and ``right`` belongs to slot ``i``: lag ``i`` in layout "lag" (0 is the query itself),
    the ``i``-th visible position in layout "forward". Shorter contexts use the first rows.

    H: heads (branches, for the first mix of "glu"), L: slots, r: rank, B: batch, Tq: queries.
    """

    diag: Tensor  # [H, L]
    left: Tensor  # [H, L, r]
    right: Tensor  # [H, L, r]
    gate: Tensor  # [B, Tq, H, r]
