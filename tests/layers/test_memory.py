"""Training memory of a full-size layer is linear in the length."""

import pytest
import torch

from hypermlp import HyperGLU
from hypermlp.bench.measure import peak_bytes


def training_bytes(length: int) -> int:
    layer = HyperGLU(768, length)
    layer.backend = "blocked"
    x = torch.randn(1, length, 768, requires_grad=True)
    grad = torch.randn_like(x)
    return peak_bytes(lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], grad))


@pytest.mark.slow
def test_memory_from_1024_to_8192_is_linear():
    short, long = training_bytes(1024), training_bytes(8192)
    print(f"T=1024: {short / 2**20:.0f} MiB, T=8192: {long / 2**20:.0f} MiB")
    assert long / short <= 8 * 1.3
