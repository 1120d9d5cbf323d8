"""Rotary positions against their definition."""

import torch

from hypermlp.layers.rotary import rotate
from hypermlp.testing import assert_close


def test_rotation_keeps_length_and_depends_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        return (rotate(q, torch.tensor([[i]]), 1e4) * rotate(k, torch.tensor([[j]]), 1e4)).sum()

    assert_close(score(7, 3), score(107, 103), tolerance=1e-10)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    assert_close(rotate(q, torch.tensor([[9]]), 1e4).norm(), q.norm(), tolerance=1e-12)
    assert_close(rotate(q, torch.tensor([[0]]), 1e4), q, tolerance=0)
    expected = q[..., 0] * torch.cos(torch.tensor(5.0, dtype=torch.float64)) - q[..., 4] * torch.sin(
        torch.tensor(5.0, dtype=torch.float64)
    )
    assert_close(rotate(q, torch.tensor([[5]]), 1e4)[..., 0], expected, tolerance=1e-12)
