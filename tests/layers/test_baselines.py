"""The baselines keep the contract of a mixer: decoding, padding and packing change no result."""

import dataclasses
import importlib
import itertools

import pytest
import torch

from hypermlp.costs import mixer as costs
from hypermlp.layers import build_mixer
from hypermlp.layers.baselines.base import Baseline
from hypermlp.layers.registry import BASELINES, mixer_config
from hypermlp.testing import assert_close, randomise_

HIDDEN, LENGTH = 32, 83  # more than one chunk, the last one shorter
KEY_VALUE = ["softmax", "softmax-naive", "diff", "fox"]


def make(name: str, dtype: torch.dtype = torch.float64, **settings) -> Baseline:
    torch.manual_seed(0)
    layer = build_mixer(name, hidden_size=HIDDEN, max_length=128, **settings).to(dtype)
    assert isinstance(layer, Baseline)
    return randomise_(layer)


def inputs(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(
    layer: Baseline, x: torch.Tensor, sizes: list[int], starts: torch.Tensor | None = None
) -> torch.Tensor:
    state = layer.new_state(batch_size=x.shape[0])
    outs = []
    for chunk in x.split(sizes, dim=1):
        outs.append(layer(chunk, state=state, starts=starts))
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize(
    "sizes", [[LENGTH], [1] * LENGTH, [16, 67], [5, 64, 1, 13]], ids=["at once", "one by one", "two", "odd"]
)
@pytest.mark.parametrize("name", BASELINES)
def test_prefill_and_decode_are_the_forward_pass(name, sizes):
    layer, x = make(name), inputs()
    with torch.no_grad():
        assert_close(run(layer, x, sizes), layer(x), tolerance=1e-10)


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_flow_through_a_state(name):
    layer, x = make(name), inputs(21).requires_grad_()
    weights = torch.randn_like(x)
    whole = torch.autograd.grad((layer(x) * weights).sum(), [x, *layer.parameters()])
    pieces = torch.autograd.grad((run(layer, x, [9, 1, 11]) * weights).sum(), [x, *layer.parameters()])
    for mine, expected in zip(pieces, whole, strict=True):
        assert_close(mine, expected, tolerance=1e-9)


@pytest.mark.parametrize("name", BASELINES)
def test_left_padding_changes_nothing_and_has_no_gradient(name):
    layer, x = make(name), inputs(37, batch=1)
    padded = torch.cat([torch.full((1, 5, HIDDEN), torch.nan, dtype=x.dtype), x], dim=1)
    other = inputs(42, batch=1)
    batch = torch.cat([padded, other]).requires_grad_()
    out = layer(batch, starts=torch.tensor([5, 0]))
    assert_close(out[:1, 5:], layer(x), tolerance=1e-10)
    assert_close(out[1:], layer(other), tolerance=1e-10)
    assert not out[0, :5].any()
    (gradient,) = torch.autograd.grad(out.sum(), batch)
    assert not gradient[0, :5].any()
    with torch.no_grad():
        assert_close(
            run(layer, batch, [3, 17, 22], torch.tensor([5, 0])),
            out,
            tolerance=1e-10,
            what="padding over two chunks",
        )


@pytest.mark.parametrize("name", BASELINES)
def test_packed_documents_are_each_alone(name):
    layer, x = make(name), inputs()
    begins = [0, 7, 8, 16, 40, 64, LENGTH]  # at the borders of chunks too
    starts = torch.zeros(2, LENGTH, dtype=torch.int64)
    for begin in begins[1:-1]:
        starts[:, begin:] = begin
    alone = torch.cat([layer(x[:, a:b]) for a, b in itertools.pairwise(begins)], dim=1)
    assert_close(layer(x, starts=starts), alone, tolerance=1e-10)
    state, outs = layer.new_state(batch_size=2), []
    with torch.no_grad():
        for first, chunk in ((0, 5), (5, 11), (16, 19), (35, LENGTH - 35)):
            outs.append(
                layer(x[:, first : first + chunk], state=state, starts=starts[:, first : first + chunk])
            )
    assert_close(torch.cat(outs, dim=1), alone, tolerance=1e-10, what="in chunks")


@pytest.mark.parametrize("name", BASELINES)
def test_no_position_sees_a_later_one(name):
    layer, x = make(name), inputs(40)
    with torch.no_grad():
        changed = torch.cat([x[:, :25], -x[:, 25:]], dim=1)
        assert_close(layer(changed)[:, :25], layer(x)[:, :25], tolerance=1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_short_and_empty_input_is_finite(name):
    layer = make(name)
    for length in (1, 2, 15, 16, 17):
        assert layer(inputs(length)).isfinite().all()
    assert layer(torch.zeros(1, 9, HIDDEN, dtype=torch.float64)).isfinite().all()
    assert not layer(inputs(6), starts=torch.tensor([6, 6])).any(), "nothing visible"


@pytest.mark.parametrize("name", BASELINES)
def test_states_can_be_branched_and_reordered(name):
    layer, x = make(name), inputs(12)
    with torch.no_grad():
        state = layer.new_state(batch_size=2)
        layer(x[:, :8], state=state)
        branch = state.clone()
        expected = layer(x[:, 8:], state=state)
        assert_close(layer(x[:, 8:], state=branch), expected, tolerance=1e-12)
        state = layer.new_state(batch_size=2)
        layer(x[:, :8], state=state)
        swapped = layer(x.flip(0)[:, 8:], state=state.reorder(torch.tensor([1, 0])))
        assert_close(swapped, expected.flip(0), tolerance=1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_a_state_shares_nothing_with_the_caller(name):
    """The state holds no tensor of the caller, can be cast, and a call in another dtype is refused."""
    layer, x = make(name, torch.float32), inputs(12).float()
    with torch.no_grad():
        expected = layer(x, starts=torch.tensor([3, 0]))
        state, buffer, starts = layer.new_state(2), torch.empty(2, 1, HIDDEN), torch.tensor([3, 0])
        outs = []
        for t in range(12):
            outs.append(layer(buffer.copy_(x[:, t : t + 1]), state=state, starts=starts if t == 0 else None))
            starts.zero_()
        assert_close(torch.cat(outs, dim=1), expected, tolerance=1e-5)
        layer.bfloat16()(x[:, :1].bfloat16(), state=state.to(torch.bfloat16))
        with pytest.raises(ValueError, match="x is torch.float32, the layer torch.bfloat16"):
            layer(x[:, :1], state=state)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BASELINES)
def test_very_strong_decays_are_finite_and_decode(name):
    layer, x = make(name, torch.float32), 1000 * inputs(40).float()
    with torch.no_grad():
        whole = layer(x)
        assert whole.isfinite().all()
        assert_close(run(layer, x, [1] * 40), whole, tolerance=5e-3)


@pytest.mark.parametrize("name", KEY_VALUE)
def test_crop_brings_back_earlier_starts(name):
    layer, x = make(name), inputs(12)
    starts = torch.zeros(2, 12, dtype=torch.int64)
    starts[:, 7:] = 7
    with torch.no_grad():
        state = layer.new_state(2)
        layer(x, state=state, starts=starts)
        assert_close(layer(x[:, 5:7], state=state.crop(5)), layer(x[:, :7])[:, 5:], tolerance=1e-12)


@pytest.mark.parametrize("size", [32, 36, 200, 300])
@pytest.mark.parametrize("name", BASELINES)
def test_any_width_of_fours_runs(name, size):
    assert build_mixer(name, hidden_size=size, max_length=8)(torch.randn(1, 5, size)).isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "softmax-naive", "diff", "gla", "retnet", "gated-deltanet"])
def test_a_width_that_cannot_run_is_refused(name):
    with pytest.raises(ValueError, match="hidden_size is 33; it must be a multiple of"):
        build_mixer(name, hidden_size=33, max_length=8)


@pytest.mark.parametrize("name", BASELINES)
def test_crop_goes_back_or_is_refused(name):
    layer, x = make(name), inputs(12)
    with torch.no_grad():
        state = layer.new_state(batch_size=2)
        layer(x, state=state)
        if name in KEY_VALUE:
            again = layer(x[:, 8:], state=state.crop(8))
            assert_close(again, layer(x)[:, 8:], tolerance=1e-12)
        else:
            with pytest.raises(ValueError, match="a recurrence does not go back"):
                state.crop(8)
        assert_close(layer(x, state=state.crop(0)), layer(x), tolerance=1e-12)


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in KEY_VALUE])
def test_a_recurrence_refuses_a_window(name):
    starts = (torch.arange(12) - 4).clamp(min=0).expand(2, 12)
    with pytest.raises(ValueError, match="not forget older positions one by one"):
        make(name)(inputs(12), starts=starts)


@pytest.mark.parametrize("name", KEY_VALUE)
def test_a_window_is_the_truncated_history(name):
    layer, x = make(name), inputs(12)
    starts = (torch.arange(12) - 4).clamp(min=0).expand(2, 12)
    assert_close(layer(x, starts=starts)[:, -1], layer(x[:, 7:])[:, -1], tolerance=1e-10)


@pytest.mark.parametrize("name", BASELINES)
def test_bfloat16_autocast_stays_near(name):
    layer, x = make(name, torch.float32), inputs(40).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    expected = layer(x)
    assert_close(out, expected, tolerance=0.06)
    rough, exact = (torch.autograd.grad(y.square().sum(), layer.o_proj.weight)[0] for y in (out, expected))
    assert_close(rough, exact, tolerance=0.06)


@pytest.mark.parametrize("name", BASELINES)
def test_costs_are_those_of_the_layer(name):
    config = mixer_config(name, hidden_size=64, max_length=32)
    layer = build_mixer(name, hidden_size=64, max_length=32)
    assert costs.parameter_count(config) == sum(parameter.numel() for parameter in layer.parameters())
    for length, dtype in ((1, torch.float32), (5, torch.float32), (30, torch.bfloat16)):
        state = layer.new_state(batch_size=3)
        with torch.no_grad():
            layer.to(dtype)(torch.randn(3, length, 64, dtype=dtype), state=state)
        held = sum(x.numel() * x.itemsize for x in state.tensors())
        assert costs.state_bytes(config, length, batch_size=3, dtype=dtype) == held
    assert costs.forward_flops(config, 32) > 2 * 32 * 4 * 64 * 64 - 1, "at least four matrices"


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(ValueError, match="'mamba3' .did you mean 'mamba'.*; allowed: .*softmax.* a label"):
        build_mixer("mamba3", hidden_size=64, max_length=8)
    with pytest.raises(ValueError, match="gla has no setting 'heads'; allowed: .*num_heads"):
        build_mixer("gla", hidden_size=64, max_length=8, heads=3)
    with pytest.raises(ValueError, match="num_heads is 3; it must be a divisor"):
        build_mixer("gla", hidden_size=64, max_length=8, num_heads=3)
    gla, linear = (build_mixer(name, hidden_size=64, max_length=8) for name in ("gla", "linear"))
    with pytest.raises(ValueError, match="the state belongs to a layer with another configuration"):
        gla(torch.zeros(1, 2, 64), state=linear.new_state(1))


@pytest.mark.parametrize("name", BASELINES)
def test_a_configuration_is_named_as_its_baseline_and_frozen(name):
    layer = build_mixer(name, hidden_size=32, max_length=8)
    assert type(layer).Config is type(layer.config)
    assert layer.config.name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.config.hidden_size = 64
    with pytest.raises(TypeError):
        type(layer.config)(32, 8)


def test_default_numbers_of_heads():
    for names, at_768, at_36 in (
        ("softmax softmax-naive linear rwkv7 path", 12, 1),
        ("hgrn2 deltanet diff", 6, 1),
        ("gla", 4, 3),
        ("gsa", 4, 4),
        ("retnet", 3, 2),
        ("gated-deltanet", 2, 1),
    ):
        for name in names.split():
            configs = [mixer_config(name, hidden_size=hidden, max_length=8) for hidden in (768, 36)]
            assert [config.num_heads for config in configs] == [at_768, at_36], name


@pytest.mark.parametrize(
    "header", ["", "from __future__ import annotations\n"], ids=["evaluated", "postponed"]
)
def test_settings_are_checked_however_annotations_are_written(header, tmp_path, monkeypatch):
    """Postponed annotations are strings; the types of fields must be checked all the same."""
    module = f"baseline_with_{'postponed' if header else 'evaluated'}_annotations"
    (tmp_path / f"{module}.py").write_text(
        f"{header}from hypermlp.layers.baselines.base import Baseline, BaselineConfig\n\n\n"
        "class ExampleConfig(BaselineConfig):\n"
        "    name = 'example'\n\n"
        "    taps: int = 4\n"
        "    chosen: int = 0\n"
        "    scale: float = 1.0\n\n\n"
        "class Example(Baseline[ExampleConfig]):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = importlib.import_module(module).Example.Config
    assert config(hidden_size=8, max_length=8, scale=2).scale == 2
    for settings, message in (
        ({"taps": "4"}, "taps is '4'; it must be a positive integer"),
        ({"taps": 0}, "taps is 0; it must be a positive integer"),
        ({"taps": True}, "taps is True; it must be a positive integer"),
        ({"chosen": -1}, "chosen is -1; it must be an integer, 0 or more"),
        ({"scale": "1"}, "scale is '1'; it must be a positive finite number"),
        ({"scale": 0.0}, "scale is 0.0; it must be a positive finite number"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0; it must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**{"hidden_size": 8, "max_length": 8} | settings)
