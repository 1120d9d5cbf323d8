"""The layer as a module: construction, initialisation, errors, compile, autocast."""

import contextlib
import copy

import pytest
import torch

from hypermlp import HyperGLU, HyperMLP, Mixer, MixerConfig
from hypermlp.layers import build_mixer
from hypermlp.ops.dispatch import BACKENDS, use_backend
from hypermlp.testing import assert_close


def test_defaults_are_the_papers():
    for layer, label in (
        (HyperMLP(64, 32), "R-cg-q-12o"),
        (HyperGLU(hidden_size=64, max_length=32), "G-cg-q-12o"),
    ):
        assert layer.config == MixerConfig.from_label(label, hidden_size=64, max_length=32)
        assert (layer.config.num_heads, layer.config.rank, layer.config.qk_width) == (2, 16, 16)


def test_build_mixer_takes_labels_and_settings():
    layer = build_mixer("R-cg-q-12o", hidden_size=64, max_length=8, rank=4, compression=8)
    assert (layer.config.qk_width, layer.config.rank) == (8, 4)
    with pytest.raises(ValueError, match="unknown mixer 'transformer'"):
        build_mixer("transformer", hidden_size=64, max_length=8)


def test_initialisation_is_the_papers():
    layer = HyperGLU(256, 128)
    for name, parameter in layer.named_parameters():
        if name.endswith(("bias", "diag")):
            assert (parameter == 0).all(), name
        else:
            assert abs(parameter.std().item() - 0.02) < 0.003, name
            assert abs(parameter.mean().item()) < 0.003, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layer: layer(torch.zeros(2, 16)),
            r"x has shape \[2, 16\]; it must be \[batch, positions, 16\]",
        ),
        (lambda layer: layer(torch.zeros(2, 3, 8)), "x has shape"),
        (lambda layer: layer(torch.zeros(2, 0, 16)), "none empty"),
        (
            lambda layer: layer(torch.zeros(1, 9, 16)),
            "9 positions, but max_length is 8; build the layer with a larger max_length",
        ),
        (lambda layer: layer(torch.zeros(1, 9, 16), starts=torch.tensor([0])), "see more than 8 positions"),
        (
            lambda layer: layer(torch.zeros(1, 12, 16), cu_seqlens=torch.tensor([0, 3, 12])),
            r"sequence that is too long: got 9 at index \(1,\); allowed: at most 8 positions \(max_length\)",
        ),
        (lambda layer: layer(torch.zeros(1, 3, 16), starts=torch.tensor([5])), "beyond its query: got 5"),
        (lambda layer: layer(torch.zeros(1, 3, 16), starts=torch.tensor([[0.0]])), "integer"),
        (
            lambda layer: layer(torch.zeros(1, 3, 16), starts=torch.ones(1, 3, dtype=torch.bool)),
            r"starts is torch.bool; .* \(attention_mask == 0\).sum\(1\)",
        ),
        (
            lambda layer: layer(torch.zeros(1, 3, 16), starts=torch.tensor([[0]])),
            r"must be \[1\] or \[1, 3\]",
        ),
        (
            lambda layer: layer(torch.zeros(1, 3, 16, dtype=torch.float64)),
            "x is torch.float64, the layer torch.float32; cast one of them, or use torch.autocast",
        ),
        (
            lambda layer: layer(torch.zeros(1, 3, 16, dtype=torch.long)),
            "x is torch.int64, the layer torch.float32; cast x$",
        ),
        (lambda layer: layer(torch.zeros(1, 3, 16, device="meta")), "x is on meta, the layer on cpu"),
        (
            lambda layer: layer(torch.zeros(1, 3, 16), state=layer.new_state(2)),
            "x has batch size 1, the state 2",
        ),
        (lambda layer: layer.new_state(0), "batch_size is 0"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(HyperGLU(16, 8, rank=2))


def test_a_mask_is_answered_with_what_to_pass():
    layer, x, mask = HyperGLU(16, 8, rank=2), torch.zeros(1, 3, 16), torch.ones(1, 3)
    instead = r".* starts=\(attention_mask == 0\)\.sum\(1\)"
    with pytest.raises(TypeError, match="HyperGLU does not take attention_mask;" + instead):
        layer(x, attention_mask=mask)
    with pytest.raises(TypeError, match="HyperGLU does not take a second argument without a name;" + instead):
        layer(x, mask)


def test_a_missing_argument_is_named_with_the_class():
    message = r"HyperMLP or HyperGLU\(\) missing 1 required positional argument: 'max_length'"
    with pytest.raises(TypeError, match=message):
        HyperGLU(16)


def test_a_refused_call_leaves_the_state_alone():
    layer, x = HyperGLU(16, 8, rank=2), torch.randn(1, 9, 16)
    state = layer.new_state(1)
    layer(x[:, :5], state=state)
    expected = layer(x[:, :6])[:, 5:]
    for bad in ({"starts": torch.tensor([-1])}, {"starts": torch.tensor([[2, 1, 1, 1]])}, {}):
        with pytest.raises(ValueError, match=r"starts|max_length"):
            layer(x[:, 5:], state=state, **bad)
        assert state.length == 5
    assert_close(layer(x[:, 5:6], state=state), expected, tolerance=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-12!", "S-p"])
def test_compiles_whole(label, compiler):
    layer = build_mixer(label, hidden_size=16, max_length=12, rank=2).double()
    x = torch.randn(2, 10, 16, dtype=torch.float64, requires_grad=True)
    compiled = compiler(layer, fullgraph=True)
    for starts in (None, torch.tensor([0, 4])):
        eager, fast = layer(x, starts=starts), compiled(x, starts=starts)
        assert_close(fast, eager, tolerance=1e-10)
        for a, e in zip(
            *(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (fast, eager)),
            strict=True,
        ):
            assert_close(a, e, tolerance=1e-10)


SLOW_LABELS = [pytest.param(label, marks=pytest.mark.slow) for label in ("R-12!", "S-p")]


@pytest.mark.thorough
@pytest.mark.parametrize("label", ["G-cg-q-12o", *SLOW_LABELS])
def test_compiles_with_symbolic_lengths(label, compiler):
    layer = build_mixer(label, hidden_size=16, max_length=12, rank=2)
    compiled = compiler(layer, fullgraph=True, dynamic=True)
    for length in (5, 8, 11):
        x = torch.randn(2, length, 16)
        for starts in (None, torch.tensor([0, 4])):
            assert_close(compiled(x, starts=starts), layer(x, starts=starts), tolerance=1e-5)


def test_autocast_trains_in_bfloat16():
    layer, x = HyperGLU(32, 12), torch.randn(2, 10, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        state = layer.new_state(2)
        chunks = torch.cat([layer(x[:, :6], state=state), layer(x[:, 6:], state=state)], dim=1)
    assert out.dtype == torch.bfloat16
    assert_close(out, layer(x), tolerance=0.05)
    assert_close(chunks, out, tolerance=0.05)
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_state_dict_round_trip():
    layer, x = HyperGLU(16, 12), torch.randn(2, 10, 16)
    other = HyperGLU(16, 12)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_any_label_can_have_other_heads_and_widths():
    layer = Mixer.from_label("S-p", hidden_size=24, max_length=8, num_heads=4, qk_width=16)
    assert layer(torch.randn(1, 8, 24)).shape == (1, 8, 24)


@pytest.mark.parametrize("how", ["attribute", "use_backend", "environment"])
@pytest.mark.parametrize(("name", "label"), [("native", "G-cg-q-12o"), ("sdpa", "S-pc")])
def test_a_backend_without_some_operation_leaves_it_to_auto(name, label, how, monkeypatch):
    """Native has no ring, sdpa has no convolution; it must not matter how the backend was chosen."""
    if BACKENDS[name].unavailable() is not None:
        pytest.skip(f"{name} is not available: {BACKENDS[name].unavailable()}")
    layer = Mixer.from_label(label, hidden_size=32, max_length=16)
    x = torch.randn(2, 9, 32)
    expected = layer(x)
    with contextlib.ExitStack() as stack:
        if how == "attribute":
            layer.backend = name
        elif how == "environment":
            monkeypatch.setenv("HYPERMLP_BACKEND", name)
        else:
            stack.enter_context(use_backend(name))
        with torch.no_grad():
            state = layer.new_state(2, capacity=16)
            outs = [layer(chunk, state=state) for chunk in x.split([5, 1, 1, 2], dim=1)]
        assert_close(torch.cat(outs, dim=1), expected, tolerance=1e-5)
        assert_close(layer(x), expected, tolerance=1e-5)


@pytest.mark.thorough
def test_a_compiled_layer_with_any_shapes_takes_a_growing_state(compiler):
    layer = Mixer.from_label("G-cg-q-12o", hidden_size=32, max_length=16)
    compiled, x = compiler(layer, dynamic=True, backend="aot_eager"), torch.randn(2, 9, 32)
    with torch.no_grad():
        state = layer.new_state(2)
        first = compiled(x[:, :4], state=state)
        outs = [first, compiled(x[:, 4:], state=copy.deepcopy(state))]
        assert_close(torch.cat(outs, dim=1), layer(x), tolerance=1e-5)
