"""The benchmark's two backbones around any mixer.

Shapes: B batch, T positions, D width, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypermlp.layers.mlp import SwigluMlp
from hypermlp.mad.mixers import MakeMixer, make

NORM_EPS, DEPTH = 1e-5, 2


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


def mixing_layers(mixer: str | MakeMixer, width: int, max_length: int) -> nn.Sequential:
    """Mixer, SwiGLU, mixer, SwiGLU."""
    parts: list[nn.Module] = []
    for _ in range(DEPTH):
        parts += [make(mixer, width, max_length), SwigluMlp(width, swiglu_width(width))]
    return nn.Sequential(*(Residual(width, part) for part in parts))


def _reset_linears(model: nn.Module, reset: Callable[[nn.Linear], object]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            reset(module)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class LanguageBackbone(nn.Module):
    """Embedding, (mixer, SwiGLU) twice, norm, head; positions come from the mixers alone. ``[B, T] -> [B, T, V]``."""

    def __init__(self, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = mixing_layers(mixer, width, max_length)
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, vocab_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Embeddings N(0, 0.02); matrices as PyTorch begins them, those in the mixers too; biases zero."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        _reset_linears(self, lambda linear: linear.reset_parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return out


class Autoencoder(nn.Module):
    """Compression: all that is left of the sequence is its last position, and from it every token is rebuilt. ``[B, T] -> [B, T, V]``."""

    positions: Tensor

    def __init__(self, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = mixing_layers(mixer, width, max_length)
        self.register_buffer("positions", sinusoids(max_length, width), persistent=False)
        hidden = [
            part
            for _ in range(2)
            for part in (nn.RMSNorm(width, eps=NORM_EPS), nn.Linear(width, width), nn.GELU())
        ]
        self.decoder = nn.Sequential(*hidden, nn.RMSNorm(width, eps=NORM_EPS), nn.Linear(width, vocab_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every matrix and the embeddings N(0, 0.02), biases zero."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        _reset_linears(self, lambda linear: nn.init.normal_(linear.weight, std=0.02))

    def forward(self, tokens: Tensor) -> Tensor:
        code = self.layers(self.embedding(tokens))[:, -1:]
        out: Tensor = self.decoder(code + self.positions[: tokens.shape[1]])
        return out


def sinusoids(length: int, width: int) -> Tensor:
    """``[T, D]``: half sines, half cosines, frequencies from 1 down to 1/10000."""
    half = width // 2
    frequency = torch.exp(-math.log(10_000) * torch.arange(half) / (half - 1))
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def build_backbone(
    task: str, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128
) -> nn.Module:
    """The one that a task is run with."""
    kind = Autoencoder if task == "compression" else LanguageBackbone
    return kind(mixer, vocab_size=vocab_size, max_length=max_length, width=width)
