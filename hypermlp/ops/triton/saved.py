"""What the forward pass saves for the backward pass: sums over the slots of each row.

Shapes: B batch, H heads, G branches (H, or 2 H for "glu"), Tq queries.
"""

import torch
from torch import Tensor

from hypermlp.ops.arguments import Attention


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sum_widths(arguments: Attention) -> tuple[int, int]:
    """Return how many sums of each row are saved, for scores and for weights.

    The inner products of the first mix; those of the second mix and ‖h‖².
    """
    rank1, rank2 = (0 if mix is None else mix.left.shape[2] for mix in (arguments.mix1, arguments.mix2))
    return rank1, rank2 + 1


def saved_size(arguments: Attention) -> int:
    """Return how many numbers the forward pass saves for the backward pass."""
    batch, queries, branches = arguments.q.shape[:3]
    width1, width2 = sum_widths(arguments)
    return batch * queries * (branches * width1 + arguments.v.shape[2] * width2)


def saved_sums(arguments: Attention, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Return views ``[B * G, Tq, width1]`` and ``[B * H, Tq, width2]`` of what the forward pass saves."""
    batch, queries, branches = arguments.q.shape[:3]
    width1, width2 = sum_widths(arguments)
    split = batch * queries * branches * width1
    return (
        saved[:split].view(batch * branches, queries, width1),
        saved[split:].view(batch * arguments.v.shape[2], queries, width2),
    )
