"""Symbolic lengths: one compilation and one exported program for all of them."""

import pytest
import torch

from hypermlp import HyperGLU
from hypermlp.layers import build_mixer
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
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


@pytest.mark.parametrize("name", ["HyperGLU", "S-p", "softmax"])
def test_a_window_compiles_and_exports(name, compiler):
    """HyperGLU with a dynamic length; softmax, which runs on chunks, with the length of the example."""
    layer = randomise_(build_mixer(name, hidden_size=32, max_length=64, sliding_window=16)).eval()
    compiled = compiler(layer, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for length in (20, 130):
            x = torch.randn(2, length, 32)
            assert_close(compiled(x), layer(x), tolerance=1e-5)
    length = torch.export.Dim("length", min=2, max=256) if name == "HyperGLU" else None
    program = torch.export.export(layer, (torch.randn(2, 70, 32),), dynamic_shapes={"x": {1: length}})
    for count in (2, 16, 17, 70, 200) if name == "HyperGLU" else (70,):
        x = torch.randn(2, count, 32)
        assert_close(program.module()(x), layer(x), tolerance=1e-5)


def test_a_hybrid_model_with_a_window_compiles(compiler):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": 61}
    config = HyperMLPConfig(mixer=["HyperGLU", "softmax"], sliding_window=[16, None], **sizes)
    model = randomise_(HyperMLPForCausalLM(config), scale=0.2).eval()
    compiled = compiler(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for length in (20, 130):
            ids = torch.randint(0, 61, (2, length))
            expected = model(ids, use_cache=False).logits
            assert_close(compiled(ids, use_cache=False).logits, expected, tolerance=1e-5)
