"""Rotary positions.

Shapes: B batch, T positions, H heads, D width of a head.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate channels i and i + D / 2 of ``x`` by the angle ``position * theta ** (-2 i / D)``.

    Scores of rotated queries and keys depend on the distance of their positions alone.

    Args:
        x: ``[B, T, H, D]``.
        positions: ``[B or 1, T]``.
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    # In float32, an angle at position 100,000 is off by up to 0.01 already. MPS has no float64.
    precise = dtype if x.device.type == "mps" else torch.float64
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=precise) / half)
    angle = (positions.to(precise)[:, :, None] * frequency)[:, :, None, :]  # [B or 1, T, 1, D / 2]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
