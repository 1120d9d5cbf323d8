"""The learned parameters of one sequence mix.

Shapes: H heads (branches), L slots, r rank, B batch, T positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.layers.resizing import resize_
from hypermlp.ops import Mix


class SequenceMix(nn.Module):
    """``R = I + Diag(diag) + left Diag(gate) rightᵀ`` for each head. The gate depends on the input.

    The layer makes it.
    """

    def __init__(self, num_heads: int, num_slots: int, rank: int):
        super().__init__()
        self.diag = nn.Parameter(torch.empty(num_heads, num_slots))
        self.left = nn.Parameter(torch.empty(num_heads, num_slots, rank))
        self.right = nn.Parameter(torch.empty(num_heads, num_slots, rank))

    def initialize_parameters(self, init: Any, std: float) -> None:
        init.zeros_(self.diag)
        init.normal_(self.left, std=std)
        init.normal_(self.right, std=std)

    def resize_(self, num_slots: int, method: str) -> None:
        """Add or drop the last slots; see ``hypermlp.layers.resizing``."""
        for parameter in (self.diag, self.left, self.right):
            resize_(parameter, num_slots, method, dim=1)

    def forward(self, gate: Tensor) -> Mix:
        """Return the mix for gates ``[B, T, H, r]`` between 0 and 1."""
        return Mix(self.diag, self.left, self.right, gate)
