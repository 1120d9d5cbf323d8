"""The other half of a block: two-layer MLPs without biases."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]
"""A function of the hidden units, applied before the activation."""


class GeluMlp(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor, change: Change | None = None) -> Tensor:
        hidden = self.up_proj(x)
        hidden = hidden if change is None else change(hidden)
        out: Tensor = self.down_proj(nn.functional.gelu(hidden))
        return out


class SwigluMlp(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor, change: Change | None = None) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if change is not None:
            gate, up = change(torch.cat([gate, up], dim=-1)).chunk(2, dim=-1)
        out: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out
