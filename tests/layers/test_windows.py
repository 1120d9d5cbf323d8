"""Sliding windows of a layer: training, prefill, chunks, decoding, padding and packing agree."""

import dataclasses

import pytest
import torch

from hypermlp import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers import build_mixer
from hypermlp.layers.registry import layer_of
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.visibility import Visibility
from hypermlp.testing import assert_close, randomise_

NAMES = ["G-cg-q-12o", "R-cg-q-12o", "S-p", "S-pc-q-12o", "G-pcg-v-12", "softmax", "diff"]
T, W = 40, 7


def windowed(name, window=W, **settings):
    return randomise_(
        build_mixer(name, hidden_size=16, max_length=12, sliding_window=window, **settings)
    ).double()


def without_window(layer, length=T):
    """Return the same layer without a window, to be given ``starts``."""
    config = dataclasses.replace(layer.config, sliding_window=None, max_length=layer.config.max_length)
    other = layer_of(config).double()
    other.load_state_dict(layer.state_dict())
    return other


def inputs(batch=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, T, 16, generator=generator, dtype=torch.float64)


def starts_of(window, begins):
    """Return ``starts`` ``[B, T]`` of a window in documents that begin at ``begins`` ``[B, T]``."""
    return torch.maximum(begins, torch.arange(T) - window + 1)


def grads_of(out, tensors):
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), tensors)


PADDING = torch.tensor([3, 20])
DOCUMENTS = torch.tensor([0] * 5 + [5] * 22 + [27] * 1 + [28] * 12)
CASES = {
    "whole": (None, torch.zeros(2, T, dtype=torch.int64)),
    "padded": (PADDING, torch.minimum(PADDING[:, None], torch.arange(1, T + 1))),
    "packed": (DOCUMENTS.expand(2, -1), DOCUMENTS.expand(2, -1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [2, W, 12])
@pytest.mark.parametrize("name", NAMES)
def test_a_window_is_what_starts_describe(name, window, case):
    layer, x = windowed(name, window), inputs().requires_grad_()
    given, begins = CASES[case]
    expected = without_window(layer)(x, starts=starts_of(window, begins))
    out = layer(x, starts=given)
    assert_close(out, expected, tolerance=1e-10)
    tensors = [x, layer.o_proj.weight]
    other = without_window(layer)
    expected = other(x, starts=starts_of(window, begins))
    for mine, theirs in zip(
        grads_of(out, tensors), grads_of(expected, [x, other.o_proj.weight]), strict=True
    ):
        assert_close(mine, theirs, tolerance=1e-10)


@pytest.mark.parametrize("backend", ["reference", "blocked", "native"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["G-cg-q-12o", "R-cg-q-12", "S-p", "G-pcg-v-12o"])
@torch.no_grad()
def test_decoding_in_chunks_equals_the_whole(name, case, backend):
    layer, x, given = windowed(name), inputs(), CASES[case][0]
    layer.backend = backend if name != "S-p" or backend == "reference" else "sdpa"
    whole = layer(x, starts=given)
    for chunks in ([1] * T, [13] + [1] * 27, [5, 8, 1, 2, 20, 4]):
        state, outs = layer.new_state(2, rollback=3), []
        for part in x.split(chunks, dim=1):
            first, last = sum(y.shape[1] for y in outs), sum(y.shape[1] for y in outs) + part.shape[1]
            own = given if given is None or given.dim() == 1 else given[:, first:last]
            outs.append(layer(part, state=state, starts=own))
        assert_close(torch.cat(outs, dim=1), whole, tolerance=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["G-cg-q-12o", "S-p", "softmax", "diff"])
@torch.no_grad()
def test_a_long_stream_drops_keys_and_goes_on(name):
    layer, length = windowed(name), 450
    x = torch.randn(2, length, 16, dtype=torch.float64)
    whole, starts = layer(x, starts=PADDING), PADDING
    state, sizes = layer.new_state(2, rollback=5), []
    for position in range(length):
        out = layer(x[:, position : position + 1], state=state, starts=starts)
        starts = None  # the padding is remembered
        if position % 50 == 0:
            assert_close(out, whole[:, position : position + 1], tolerance=1e-10)
        sizes.append(max(rows.buffer.shape[1] for rows in state._rows.values()))
        assert state._rows["keys"].held <= W - 1 + 5 + 64
    assert max(sizes) <= W - 1 + 5 + 64 + 2  # rows of a buffer
    state.crop(length - 5)
    out = layer(x[:, -5:], state=state)
    assert_close(out, whole[:, -5:], tolerance=1e-10)
    with pytest.raises(UserError, match="sliding window needs .* positions that were dropped"):
        state.crop(length - 200)
    again = layer.new_state(2, rollback=5)
    layer(x[:, :300], state=again)
    assert again._rows["keys"].held == W - 1 + 5


@pytest.mark.thorough
@torch.no_grad()
def test_a_state_of_fixed_size_is_a_ring():
    for name in ("G-cg-q-12o", "S-p"):
        layer, x = windowed(name), inputs()
        whole = layer(x, starts=PADDING)
        for capacity, rollback, rows in ((T, 4, W + 4), (W, 4, W), (T, 128, T)):
            state = layer.new_state(2, capacity=capacity, rollback=rollback)
            outs = [layer(x[:, :9], state=state, starts=PADDING)]
            outs += [layer(x[:, i : i + 1], state=state) for i in range(9, T)]
            assert_close(torch.cat(outs, dim=1), whole, tolerance=1e-10)
            assert state.keys.shape[1] == rows
        state = layer.new_state(2, capacity=T, rollback=4)
        layer(x, state=state, starts=PADDING)
        assert_close(layer(x[:, -4:], state=state.crop(T - 4)), whole[:, -4:], tolerance=1e-10)
        with pytest.raises(UserError, match="cannot crop to 30 of 40 positions: the state holds 11"):
            state.crop(30)
        with pytest.raises(UserError, match="more than the 11 positions that the state holds"):
            layer(x[:, :6], state=state)


@pytest.mark.parametrize("name", ["G-cg-q-12o", "S-p"])
def test_gradients_flow_through_a_state(name):
    layer, x = windowed(name), inputs().requires_grad_()
    state = layer.new_state(2, rollback=2)
    out = torch.cat([layer(part, state=state) for part in x.split(5, dim=1)], dim=1)
    whole = layer(x)
    assert_close(out, whole, tolerance=1e-10)
    assert_close(grads_of(out, [x])[0], grads_of(whole, [x])[0], tolerance=1e-10)


@torch.no_grad()
def test_registers_stay_visible():
    layer, x = windowed("G-cg-q-12o", num_registers=2), inputs()
    expected = without_window(layer)(x, starts=starts_of(W, torch.zeros(2, T, dtype=torch.int64)))
    assert_close(layer(x), expected, tolerance=1e-10)
    state = layer.new_state(2, rollback=0)
    out = torch.cat([layer(part, state=state) for part in x.split([9, 1, 1, 20, 9], dim=1)], dim=1)
    assert_close(out, expected, tolerance=1e-10)


def test_angles_are_accurate_far_from_the_beginning():
    x = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[100_000, 99_990, 1_000_000]])
    exact = rotate(x.double(), positions, Rope(10_000.0))
    assert_close(rotate(x, positions, Rope(10_000.0)), exact, tolerance=1e-6)


@pytest.mark.parametrize("window", [0, -3, 13, 2.5, True, "7"])
def test_bad_windows_are_refused(window):
    with pytest.raises(UserError, match="sliding_window is .* at most the context of 12"):
        MixerConfig(hidden_size=16, max_length=12, sliding_window=window)
    with pytest.raises(UserError, match="sliding_window is"):
        build_mixer("diff", hidden_size=16, max_length=12, sliding_window=window)


def test_baselines_without_windows_say_so():
    with pytest.raises(UserError, match="softmax-naive computes all scores"):
        build_mixer("softmax-naive", hidden_size=16, max_length=12, sliding_window=4)
    with pytest.raises(UserError, match="gla has no setting 'sliding_window'"):
        build_mixer("gla", hidden_size=16, max_length=12, sliding_window=4)


def test_layers_with_the_same_window_share_its_numbers():
    visibility = Visibility(None, past=0, new=T, device=torch.device("cpu"))
    assert visibility.windowed(W, batch=2) is visibility.windowed(W, batch=2)
    assert visibility.windowed(T, batch=2) is visibility


def test_a_window_seen_through_a_window_is_the_narrower_one():
    visibility = Visibility(torch.tensor([0, 3]), past=0, new=T, device=torch.device("cpu"))
    wide = visibility.windowed(W + 2, batch=2)
    for once, twice in ((visibility.windowed(W, batch=2), wide.windowed(W, batch=2)),):
        assert torch.equal(twice.first_visible, once.first_visible)
        assert torch.equal(twice.reach, once.reach)
        assert torch.equal(twice.positions(), once.positions())
