"""What all tests share: reproducible randomness, two threads at most, one fixture per backend."""

import pytest
import torch

from hypermlp.ops.backends import BACKENDS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    reason = BACKENDS[request.param].unavailable()
    if reason is not None:
        pytest.skip(f"backend {request.param} is not available: {reason}")
    return request.param


@pytest.fixture
def compiler():
    """torch.compile with nothing left over from other tests: it counts recompilations per function, not per layer."""
    torch.compiler.reset()
    return torch.compile
