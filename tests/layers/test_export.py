"""Symbolic lengths: one compilation and one exported program for all of them."""

import pytest
import torch

from hypermlp import HyperGLU
from hypermlp.testing import assert_close, randomise_

pytestmark = pytest.mark.thorough


def test_one_compilation_for_twelve_lengths(compiler):
    from torch._dynamo.testing import CompileCounter

    layer, counter = randomise_(HyperGLU(64, max_length=64)).eval(), CompileCounter()
    compiled = compiler(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for length in range(5, 53, 4):
            x = torch.randn(2, length, 64)
            assert_close(compiled(x), layer(x), tolerance=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["native", "blocked", "reference"], indirect=True)
def test_export_with_a_dynamic_length(backend):
    layer = randomise_(HyperGLU(16, max_length=64, rank=3)).eval()
    layer.backend = backend
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(layer, (torch.randn(2, 9, 16),), dynamic_shapes={"x": {1: length}})
    for count in (2, 3, 17, 64):
        x = torch.randn(2, count, 16)
        assert_close(program.module()(x), layer(x), tolerance=1e-5)
