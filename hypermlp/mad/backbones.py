"""The benchmark's language-model backbone around any mixer.

Shapes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.layers import build_mixer
from hypermlp.layers.mlp import SwigluMlp

NORM_EPS = 1e-5


def swiglu_width(width: int) -> int:
    """8/3 of the width, up to a multiple of 16."""
    return -(-(8 * width // 3) // 16) * 16


class Residual(nn.Module):
    """``x + inner(norm(x))``."""

    def __init__(self, width: int, inner: nn.Module):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x))
        return out


class LanguageBackbone(nn.Module):
    """Embedding, (mixer, SwiGLU) twice, norm, head; positions come from the mixers alone. ``[B, T] -> [B, T, V]``."""

    def __init__(self, mixer: str, *, vocab_size: int, max_length: int, width: int = 128, depth: int = 2, **settings: Any):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [build_mixer(mixer, hidden_size=width, max_length=max_length, **settings), SwigluMlp(width, swiglu_width(width))]
        self.layers = nn.Sequential(*(Residual(width, part) for part in parts))
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, vocab_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Embeddings N(0, 0.02); matrices as PyTorch begins them, those in the mixers too; biases zero."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return out
