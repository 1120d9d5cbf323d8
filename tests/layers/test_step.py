"""The kernel for a few new positions gives the numbers of the general path, where it applies."""

import pytest
import torch

from hypermlp import Mixer
from hypermlp.layers import step
from hypermlp.ops import native
from hypermlp.testing import assert_close, randomise_

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}"
)


def setup(label="G-cg-q-12o", dtype=torch.float64, **settings):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=30, rank=3, **settings)).to(dtype)
    return layer, torch.randn(2, 30, 16, dtype=dtype), layer.new_state(2)


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-cg-q-12o", "G-12!", "R-1!", "G-c", "R"])
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 5])])
def test_chunks_of_any_size(label, starts):
    layer, x, state = setup(label)
    with torch.no_grad():
        full = layer(x, starts=starts)
        outs = [
            layer(chunk, state=state, starts=starts)
            for chunk in x.split([1, 2, 3, 4, 5, 1, 8, 1, 1, 4], dim=1)
        ]
    assert_close(torch.cat(outs, dim=1), full, tolerance=1e-10)


def test_where_it_applies():
    layer, x, _ = setup(dtype=torch.float32)

    def applies(layer=layer, x=x[:, :1]):
        return step.steps_natively(layer, x)

    assert not applies()  # gradients may be needed
    with torch.no_grad():
        assert applies()
        assert applies(x=x[:, :4])
        assert not applies(x=x[:, :5])
        assert not applies(x=x[:1, :1].expand(40, -1, -1))
        assert not applies(x=x[:, :1].double())
        assert applies(setup(dtype=torch.bfloat16)[0], x[:, :1].bfloat16())
        assert applies(setup("R-p", dtype=torch.float32)[0])
        assert not applies(setup("S", dtype=torch.float32)[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert not applies()
        for part in (layer.mix1, layer.v_proj):  # the kernel does not call modules
            for register in (part.register_forward_hook, part.register_forward_pre_hook):
                handle = register(lambda *_: None)
                assert not applies()
                handle.remove()
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert not applies()
        handle.remove()
        assert applies()
        layer.backend = "blocked"
        assert not applies()


def test_opcheck():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :7], state=state)
        new = x[:, 7:9]
        config = layer.config
        keys, _ = state.room("keys", new, (config.num_branches, config.qk_dim))
        values, _ = state.room("values", new, (config.num_heads, config.vo_dim))
        history, past = state.room("inputs", new, new.shape[2:])
        weights = [
            part.weight for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gates)
        ]
        parameters = [p for mix in (layer.mix1, layer.mix2) for p in (mix.diag, mix.left, mix.right)]
        starts = torch.tensor([[0, 0], [3, 3]])
        reach = torch.tensor([[8, 9], [5, 6]])
        arguments = (
            new,
            history,
            past,
            layer.k_conv,
            layer.v_conv,
            None,
            None,
            None,
            *weights,
            layer.gates.bias,
        )
        caches = (keys, values, 7)
        gates = layer.gates.offsets
        checks = torch.library.opcheck(
            torch.ops.hypermlp.native_decoding_step.default,
            (*arguments, *gates, *caches, *parameters, starts, reach, "glu", "lag", 1e-12),
        )
    assert set(checks.values()) == {"SUCCESS"}


class Cast(torch.nn.Module):
    """A projection that returns another dtype, like an adapter."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.linear, self.dtype = linear, dtype

    def forward(self, x):
        return self.linear(x).to(self.dtype)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_projections_of_another_dtype_are_not_misread(name):
    layer, x, state = setup(dtype=torch.float32)
    if name == "v_proj":
        layer.o_proj = layer.o_proj.bfloat16()
    setattr(layer, name, Cast(getattr(layer, name), torch.bfloat16))
    layer.backend = "native"
    with torch.no_grad():
        try:
            full = layer(x)
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError)):
                layer(x[:, :1], state=state)
            return
        outs = [layer(x[:, i : i + 1], state=state) for i in range(30)]
    assert_close(torch.cat(outs, dim=1), full, tolerance=0.05)


def test_a_mix_with_a_hook_is_called():
    layer, x, state = setup()
    layer.mix1.register_forward_hook(lambda _module, _inputs, mix: mix._replace(gate=0 * mix.gate))
    with torch.no_grad():
        outs = [layer(x[:, i : i + 1], state=state) for i in range(30)]
        assert_close(torch.cat(outs, dim=1), layer(x), tolerance=1e-10)


def test_a_call_in_another_dtype_leaves_the_state_as_it_was():
    layer, x, state = setup(dtype=torch.float32)
    with torch.no_grad():
        full = layer(x)
        layer(x[:, :10], state=state)
        state = state.clone()  # its buffers are full
        layer.double()
        for count in (1, 8):
            with pytest.raises(ValueError, match=r"the state holds torch\.float32"):
                layer(x[:, 10 : 10 + count].double(), state=state)
        layer.float()
        outs = [layer(x[:, i : i + 1], state=state) for i in range(10, 30)]
    assert_close(torch.cat(outs, dim=1), full[:, 10:], tolerance=1e-4)


def test_a_step_over_tensors_saved_for_backward_raises():
    layer, x, state = setup()
    out = layer(x[:, :10], state=state)
    state.detach().crop(8)
    with torch.no_grad():
        layer(x[:, 15:16], state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_derivatives_by_transforms_are_refused_not_zero():
    layer, x, _ = setup()
    with torch.no_grad(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda z: layer(z, state=layer.new_state(2)), (x[:, :1],), (x[:, :1],))
    with pytest.raises(RuntimeError, match=r"cannot be differentiated by torch.func.*backend='reference'"):
        torch.func.grad(lambda z: layer(z).sum())(x)
    layer.backend = "reference"
    assert torch.func.grad(lambda z: layer(z).sum())(x).shape == x.shape
    assert torch.func.jvp(layer, (x,), (x,))[1].abs().max() > 0


def test_an_adapter_without_a_weight():
    layer, x, state = setup()
    expected = layer(x)
    layer.q_proj = torch.nn.Sequential(layer.q_proj)
    assert_close(layer(x), expected, tolerance=1e-12)
    with torch.no_grad():
        assert_close(layer(x[:, :3], state=state), expected[:, :3], tolerance=1e-10)
