"""Rotary positions.

Shapes: B batch, T positions, H heads, D width of a head.
"""

import torch
from torch import Tensor


def angles(positions: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of ``position * theta ** (-2 i / width)`` for i below ``width / 2``.

    Both have the shape of ``positions`` and one more dimension of ``width / 2``.
    """
    half = width // 2
    # In float32, an angle at position 100,000 is off by up to 0.01 already. MPS has no float64.
    precise = dtype if positions.device.type == "mps" else torch.float64
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=precise) / half)
    angle = positions.to(precise)[..., None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate channels i and i + D / 2 of ``x`` by the angle ``position * theta ** (-2 i / D)``.

    Scores of rotated queries and keys depend on the distance of their positions alone.

    Args:
        x: ``[B, T, H, D]``.
        positions: ``[B or 1, T]``.
        theta: base of the frequencies.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles(positions[:, :, None], x.shape[-1], theta, dtype)  # [B or 1, T, 1, D / 2]
    first, second = x.to(dtype).split(x.shape[-1] // 2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
