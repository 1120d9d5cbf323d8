"""The learned parameters of one sequence mix.

Shapes: H heads (branches), L slots, r rank, B batch, T positions.
"""

import torch
from torch import Tensor, nn

from hypermlp.ops import Mix


class SequenceMix(nn.Module):
    """R = I + Diag(diag) + left Diag(gate) rightᵀ for each head. The gate depends on the input and comes from the layer."""

    def __init__(self, num_heads: int, num_slots: int, rank: int):
        super().__init__()
        self.diag = nn.Parameter(torch.empty(num_heads, num_slots))
        self.left = nn.Parameter(torch.empty(num_heads, num_slots, rank))
        self.right = nn.Parameter(torch.empty(num_heads, num_slots, rank))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.diag)
        nn.init.normal_(self.left, std=std)
        nn.init.normal_(self.right, std=std)

    def forward(self, gate: Tensor) -> Mix:
        """``gate``: ``[B, T, H * r]``, between 0 and 1."""
        return Mix(
            self.diag, self.left, self.right, gate.unflatten(-1, (self.left.shape[0], self.left.shape[2]))
        )
