"""What tests in Triton's interpreter share (``TRITON_INTERPRET=1``; tests/ops/test_triton.py starts them).

Interpreted kernels are slow, so chunks are small there, and of many cases few belong to the fast part.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from hypermlp.ops.triton import interpreting

GUARD, CANARY = 64, 12345.0
"""Numbers on both sides of every buffer, and their value."""
EVERY = 40
"""One of so many cases of a parametrised test belongs to the fast part."""
MINUTES = {
    "test_batch_composition_does_not_matter",
    "test_same_input_same_bits",
    "test_strong_scores_stay_finite",
    "test_thread_count_does_not_matter",
}
"""Tests that belong to the slow part."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """In the interpreter, mark most cases of the contract for "triton" as slow."""
    if not interpreting():
        return
    seen = Counter()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.parent == Path(__file__).parent and parameters.get("backend") == "triton":
            name = item.originalname
            if seen[name] % EVERY or name in MINUTES or item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Run interpreted kernels on small chunks in guarded memory; return the buffers, by name."""
    if not interpreting():
        yield []
        return
    from hypermlp.ops.triton import elementwise, launch

    buffers = []

    def guarded_empty(name, like, size, dtype):
        """Return memory full of NaN between canaries, which must live."""
        room = torch.full((GUARD + size + GUARD,), CANARY, dtype=dtype, device=like.device)
        room[GUARD : GUARD + size] = torch.nan
        buffers.append((name, room))
        return room[GUARD : GUARD + size]

    for module in (launch, elementwise):
        monkeypatch.setattr(module, "empty", guarded_empty)
    with launch.use_settings(residues=2, rows=8, programs=4, decode_programs=4, scratch_bytes=1):
        yield buffers
    for name, room in buffers:
        for edge in (room[:GUARD], room[-GUARD:]):
            assert (edge == torch.tensor(CANARY, dtype=room.dtype)).all(), f"{name}: written beyond its end"


@pytest.fixture(autouse=True)
def hinted(monkeypatch):
    """Check every alignment hint, which the interpreter itself ignores; return how many there were."""
    count = [0]
    if not interpreting():
        return count
    import triton.runtime.interpreter as interpreter
    from triton import language as tl

    patch = interpreter._patch_lang

    def check(input, values):
        assert isinstance(input, tl.tensor)
        assert (input.handle.data % int(values[0]) == 0).all(), "an address is less aligned than its hint"
        count[0] += 1
        return input

    def patched(function):
        scope = patch(function)
        scope.set_attr(tl, "multiple_of", check)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patched)
    return count
