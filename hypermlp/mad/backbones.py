"""The two backbones of the benchmark, around any mixer.

Shapes: B batch, T positions, D width, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hypermlp.layers.mlp import SwigluMlp
from hypermlp.mad.mixers import MakeMixer, make

NORM_EPS, DEPTH, INIT_STD = 1e-5, 2, 0.02


def swiglu_width(width: int) -> int:
    """Return 8/3 of the width, rounded up to a multiple of 16."""
    return -(-(8 * width // 3) // 16) * 16


class Residual(nn.Module):
    """``x + inner(norm(x))``."""

    def __init__(self, width: int, inner: nn.Module):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Backbone(nn.Module):
    """Embedding and residual layers of both backbones, which map ``[B, T]`` tokens to ``[B, T, V]``.

    The residual layers are mixer, SwiGLU, mixer, SwiGLU.
    """

    def __init__(self, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [make(mixer, width, max_length), SwigluMlp(width, swiglu_width(width))]
        self.layers = nn.Sequential(*(Residual(width, layer) for layer in layers))

    @torch.no_grad()
    def initialize(self, reset: Callable[[nn.Linear], object]) -> None:
        """Draw embeddings from N(0, 0.02), call ``reset`` on every linear layer, set all biases to zero."""
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                reset(module)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class LanguageBackbone(Backbone):
    """Embedding, (mixer, SwiGLU) twice, norm, head. Only the mixers see positions."""

    def __init__(self, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128):
        super().__init__(mixer, vocab_size=vocab_size, max_length=max_length, width=width)
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, vocab_size)
        self.initialize(lambda linear: linear.reset_parameters())  # also within the mixers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


class Autoencoder(Backbone):
    """Backbone of the compression task: rebuilds every token from the output at the last position alone."""

    positions: Tensor

    def __init__(self, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128):
        super().__init__(mixer, vocab_size=vocab_size, max_length=max_length, width=width)
        self.register_buffer("positions", sinusoids(max_length, width), persistent=False)
        hidden = [
            part
            for _ in range(2)
            for part in (nn.RMSNorm(width, eps=NORM_EPS), nn.Linear(width, width), nn.GELU())
        ]
        self.decoder = nn.Sequential(*hidden, nn.RMSNorm(width, eps=NORM_EPS), nn.Linear(width, vocab_size))
        self.initialize(lambda linear: nn.init.normal_(linear.weight, std=INIT_STD))

    def forward(self, tokens: Tensor) -> Tensor:
        code = self.layers(self.embedding(tokens))[:, -1:]
        return self.decoder(code + self.positions[: tokens.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """Return ``[T, D]`` positions: half sines, half cosines, with frequencies from 1 down to 1/10000."""
    half = width // 2
    frequency = torch.exp(-math.log(10_000) * torch.arange(half) / (half - 1))
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def build_backbone(
    task: str, mixer: str | MakeMixer, *, vocab_size: int, max_length: int, width: int = 128
) -> nn.Module:
    """Return the backbone that the benchmark trains on ``task``."""
    kind = Autoencoder if task == "compression" else LanguageBackbone
    return kind(mixer, vocab_size=vocab_size, max_length=max_length, width=width)
