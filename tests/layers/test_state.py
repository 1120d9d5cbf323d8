"""A decoding state can be reordered, repeated, cropped, cloned and moved, and goes on exactly."""

import pytest
import torch

from hypermlp import HyperGLU, Mixer
from hypermlp.testing import assert_close, randomise_

TIGHT = 1e-10


def setup(label="G-cg-q-12o", batch=3):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=20, rank=3)).double()
    x = torch.randn(batch, 20, 16, dtype=torch.float64)
    return layer, x, layer.new_state(batch)


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-12!", "S-p"])
def test_reorder_and_repeat(label):
    layer, x, state = setup(label)
    with torch.no_grad():
        layer(x[:, :7], state=state)
        order = torch.tensor([2, 2, 0, 1])
        assert_close(layer(x[order, 7:12], state=state.reorder(order)), layer(x[order])[:, 7:12], tolerance=TIGHT)
        twice = x[order].repeat_interleave(2, dim=0)
        assert_close(layer(twice[:, 12:13], state=state.repeat(2)), layer(twice)[:, 12:13], tolerance=TIGHT)
    assert state.batch_size == 8


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-12!", "S-pc"])
@pytest.mark.parametrize("kept", [0, 1, 2, 5, 12])
def test_crop_goes_back(label, kept):
    layer, x, state = setup(label)
    with torch.no_grad():
        layer(x[:, :7], state=state)
        layer(x[:, 7:12], state=state)
        state.crop(kept)
        assert state.length == kept
        assert_close(layer(x[:, kept:], state=state), layer(x)[:, kept:], tolerance=TIGHT)


def test_crop_beyond_the_rollback_is_refused_and_says_how_to_ask_for_it():
    layer, x, _ = setup()
    state = layer.new_state(3, rollback=2)
    layer(x[:, :12], state=state)
    with pytest.raises(ValueError, match=r"cannot crop 6 positions.*rollback=6"):
        state.crop(6)
    state.crop(10)
    assert_close(layer(x[:, 10:], state=state), layer(x)[:, 10:], tolerance=TIGHT)
    with pytest.raises(ValueError, match="between 0 and 20"):
        state.crop(21)


def test_crop_returns_to_the_starts_of_that_position():
    layer, x, state = setup()
    starts = torch.tensor([0] * 5 + [5] * 15).expand(3, -1)
    with torch.no_grad():
        layer(x[:, :9], state=state, starts=starts[:, :9])
        state.crop(4)
        rest = torch.cat([layer(x[:, 4:5], state=state), layer(x[:, 5:], state=state, starts=starts[:, 5:])], dim=1)
        assert_close(rest, layer(x, starts=starts)[:, 4:], tolerance=TIGHT)


def test_starts_hold_on_when_none_are_given():
    layer, x, state = setup()
    starts = torch.tensor([0, 4, 9])
    with torch.no_grad():
        parts = [layer(x[:, :6], state=state, starts=starts), layer(x[:, 6:11], state=state), layer(x[:, 11:], state=state)]
        assert_close(torch.cat(parts, dim=1), layer(x, starts=starts), tolerance=TIGHT)


def test_a_clone_is_independent():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :7], state=state)
        branch = state.clone()
        layer(x.flip(1)[:, :5], state=branch)
        assert_close(layer(x[:, 7:], state=state), layer(x)[:, 7:], tolerance=TIGHT)


def test_moved_and_cast():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :7], state=state, starts=torch.tensor([0, 1, 2]))
        assert state.to("meta").keys.device.type == "meta"
        _, _, state = setup()
        layer(x[:, :7], state=state)
        state.to(torch.float32)
        assert state.keys.dtype == torch.float32
        out = layer.float()(x[:, 7:].float(), state=state)
        assert_close(out, layer.double()(x)[:, 7:], tolerance=1e-4)


def test_modes_can_change_between_steps():
    """Inference mode, no_grad and training steps may follow each other on one state."""
    layer, x, state = setup()
    with torch.inference_mode():
        layer(x[:, :4], state=state)
        layer(x[:, 4:6], state=state)
    with torch.no_grad():
        layer(x[:, 6:8], state=state)
    out = layer(x[:, 8:10], state=state)
    out.sum().backward()
    with torch.no_grad():
        assert_close(layer(x[:, 10:], state=state), layer(x)[:, 10:], tolerance=TIGHT)


def test_bad_arguments():
    state = HyperGLU(16, 8).new_state(2)
    for bad in ([0, 2], [-1], []):
        with pytest.raises(ValueError, match="between 0 and 1"):
            state.reorder(torch.tensor(bad, dtype=torch.long))
    with pytest.raises(ValueError, match="times is 0"):
        state.repeat(0)
