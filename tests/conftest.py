"""What all tests share: reproducible randomness, two threads at most, one fixture per backend."""

import multiprocessing
import sys
from contextlib import contextmanager

import pytest
import torch

from hypermlp.ops.backends import BACKENDS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def server():
    """Processes that begin with everything imported; started here, because whoever starts the one fork server chooses the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypermlp.train.run", "hypermlp.mad.training"])
    process = context.Process(target=sys.exit)
    process.start()
    process.join()
    return context


@contextmanager
def _threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[*BACKENDS, "native, 1 thread"])
def backend(request):
    name, *one_thread = request.param.split(", ")
    reason = BACKENDS[name].unavailable()
    if reason is not None:
        pytest.skip(f"backend {name} is not available: {reason}")
    with _threads(1 if one_thread else 2):
        yield name


@pytest.fixture
def compiler():
    """torch.compile with nothing left over from other tests: it counts recompilations per function, not per layer."""
    torch.compiler.reset()
    return torch.compile
