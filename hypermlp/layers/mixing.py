"""The learned parameters of one sequence mix.

Shapes: H heads (branches), L slots, r rank, B batch, T positions, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypermlp.ops import Mix


class SequenceMix(nn.Module):
    """R(x) = I + Diag(diag) + left Diag(sigmoid(x W + b)) rightᵀ for each head, as a ``Mix`` for the operator."""

    def __init__(self, hidden_size: int, num_heads: int, max_length: int, rank: int):
        super().__init__()
        self.num_heads = num_heads
        self.diag = nn.Parameter(torch.empty(num_heads, max_length))
        self.left = nn.Parameter(torch.empty(num_heads, max_length, rank))
        self.right = nn.Parameter(torch.empty(num_heads, max_length, rank))
        self.gate = nn.Linear(hidden_size, num_heads * rank)

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.diag)
        for weight in (self.left, self.right, self.gate.weight):
            nn.init.normal_(weight, std=std)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Mix:
        gate = torch.sigmoid(self.gate(x)).unflatten(-1, (self.num_heads, -1))  # [B, T, H, r]
        return Mix(self.diag, self.left, self.right, gate)
