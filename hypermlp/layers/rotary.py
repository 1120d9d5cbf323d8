"""Rotary positions, and their scaling for contexts longer than those of training.

Shapes: B batch, T positions, H heads, D width of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.config import MixerConfig


class Rope(NamedTuple):
    """The settings of rotary positions: the angle of channel i at a position is ``position * frequency[i]``.

    With the factor s, the original context L, the width D of a head, and YaRN's numbers of turns a and b::

        "default"   frequency[i] = theta ** (-2 i / D)
        "ntk"       frequency[i] = (theta * s ** (D / (D - 2))) ** (-2 i / D)
        "yarn"      frequency[i] = (g + (1 - g) / s) * theta ** (-2 i / D)
                    g = clamp((L * theta ** (-2 i / D) / (2 pi) - a) / (b - a), 0, 1)
                    rotated queries and keys are multiplied by 0.1 log(s) + 1

    "ntk" leaves the fastest channel as it is and slows the slowest down s times. "yarn" leaves channels that
    turn b times or more in the original context, and slows those down s times that turn a times or less.

    Papers: Su et al., "RoFormer" (2021); bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al., "YaRN:
    Efficient Context Window Extension of Large Language Models" (2023).
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_length: int | None = None
    beta_slow: float = 1.0
    beta_fast: float = 32.0

    @classmethod
    def of(cls, config: MixerConfig) -> "Rope":
        """Return the settings of a label's layer."""
        return cls(*(getattr(config, f"rope_{name}") for name in cls._fields))

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 0.1 * math.log(self.factor) + 1 if self.type == "yarn" else 1.0

    def frequencies(self, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the angles per position, ``[width / 2]``."""
        half, theta = width // 2, self.theta
        if self.type == "ntk":
            theta *= self.factor ** (width / (width - 2))
        plain = theta ** (-torch.arange(half, device=device, dtype=dtype) / half)
        if self.type != "yarn":
            return plain
        assert self.original_length is not None
        turns = self.original_length * plain / (2 * math.pi)
        kept = ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0, 1)
        return (kept + (1 - kept) / self.factor) * plain


def angles(positions: Tensor, width: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of ``position * frequency``, times ``rope.magnitude``.

    Both have the shape of ``positions`` and one more dimension of ``width / 2``.
    """
    # In float32, an angle at position 100,000 is off by up to 0.01 already. MPS has no float64.
    precise = dtype if positions.device.type == "mps" else torch.float64
    angle = positions.to(precise)[..., None] * rope.frequencies(width, positions.device, precise)
    cos, sin = angle.cos(), angle.sin()
    if rope.magnitude != 1:
        cos, sin = cos * rope.magnitude, sin * rope.magnitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate channels i and i + D / 2 of ``x`` by the angle ``position * frequency[i]``.

    Scores of rotated queries and keys depend on the distance of their positions alone.

    Args:
        x: ``[B, T, H, D]``.
        positions: ``[B or 1, T]``.
        rope: frequencies and magnitude.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles(positions[:, :, None], x.shape[-1], rope, dtype)  # [B or 1, T, 1, D / 2]
    first, second = x.to(dtype).split(x.shape[-1] // 2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
