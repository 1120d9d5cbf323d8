"""The kernels that take a few new positions in one go: the same numbers as the general way, and only where they apply."""

import pytest
import torch

from hypermlp import Mixer
from hypermlp.layers import step
from hypermlp.ops import native
from hypermlp.testing import assert_close, randomise_

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}")


def setup(label="G-cg-q-12o", dtype=torch.float64, **settings):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=30, rank=3, **settings)).to(dtype)
    return layer, torch.randn(2, 30, 16, dtype=dtype), layer.new_state(2)


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-cg-q-12o", "G-12!", "R-1!", "G-c", "R"])
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 5])])
def test_chunks_of_any_size(label, starts):
    layer, x, state = setup(label)
    with torch.no_grad():
        full = layer(x, starts=starts)
        outs = [layer(chunk, state=state, starts=starts) for chunk in x.split([1, 2, 3, 4, 5, 1, 8, 1, 1, 4], dim=1)]
    assert_close(torch.cat(outs, dim=1), full, tolerance=1e-10)


def test_where_it_applies():
    layer, x, _ = setup(dtype=torch.float32)
    config = layer.config

    def applies(config=config, x=x[:, :1], backend="auto"):
        return step.steps_natively(config, x, backend)

    assert not applies()  # gradients might be asked for
    with torch.no_grad():
        assert applies()
        assert applies(x=x[:, :4].double())
        assert not applies(x=x[:, :5])
        assert not applies(x=x[:, :1].bfloat16())
        assert not applies(backend="blocked")
        assert not applies(config=Mixer.from_label("R-p", hidden_size=64, max_length=8).config)
        assert not applies(config=Mixer.from_label("S", hidden_size=16, max_length=8).config)
        with torch.autocast("cpu", torch.bfloat16):
            assert not applies()


def test_opcheck():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :7], state=state)
        q, k, v, gates = (module(x[:, 7:9]) for module in (layer.q_proj, layer.k_proj, layer.v_proj, layer.gates))
        keys, values = state.caches(k, v)
        parameters = [p for mix in (layer.mix1, layer.mix2) for p in (mix.diag, mix.left, mix.right)]
        starts = torch.tensor([[0, 0], [3, 3]])
        arguments = (q, k, v, gates, keys, values, 7, *parameters, starts, "glu", "lag", 1e-12)
        history, past = state.input_cache(x[:, 7:9])
        conv_arguments = (x[:, 7:9], history, past, layer.k_conv, layer.v_conv, None)
        for name, inputs in (("native_step", arguments), ("native_conv_step", conv_arguments)):
            checks = torch.library.opcheck(getattr(torch.ops.hypermlp, name).default, inputs)
            assert set(checks.values()) == {"SUCCESS"}
