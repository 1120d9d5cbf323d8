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
        assert_close(
            layer(x[order, 7:12], state=state.reorder(order)), layer(x[order])[:, 7:12], tolerance=TIGHT
        )
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
    layer = randomise_(HyperGLU(16, 200, rank=2)).double()
    x = torch.randn(1, 200, 16, dtype=torch.float64)
    state = layer.new_state(1, rollback=5)
    with torch.no_grad():
        for first in range(0, 200, 50):
            layer(x[:, first : first + 50], state=state)
        with pytest.raises(ValueError, match=r"cannot crop to 9 of 200 positions.*rollback=\d+"):
            state.crop(9)
        state.crop(195)
        assert_close(layer(x[:, 195:], state=state), layer(x)[:, 195:], tolerance=TIGHT)
        assert state.inputs.shape[1] < 100
        state.crop(0)
        assert_close(layer(x, state=state), layer(x), tolerance=TIGHT)
    with pytest.raises(ValueError, match="between 0 and 200"):
        state.crop(201)


def test_crop_returns_to_the_starts_of_that_position():
    layer, x, state = setup()
    starts = torch.tensor([0] * 5 + [5] * 15).expand(3, -1)
    with torch.no_grad():
        layer(x[:, :9], state=state, starts=starts[:, :9])
        state.crop(4)
        rest = torch.cat(
            [layer(x[:, 4:5], state=state), layer(x[:, 5:], state=state, starts=starts[:, 5:])], dim=1
        )
        assert_close(rest, layer(x, starts=starts)[:, 4:], tolerance=TIGHT)


def test_starts_hold_on_when_none_are_given():
    layer, x, state = setup()
    starts = torch.tensor([0, 4, 9])
    with torch.no_grad():
        parts = [
            layer(x[:, :6], state=state, starts=starts),
            layer(x[:, 6:11], state=state),
            layer(x[:, 11:], state=state),
        ]
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


def test_the_state_does_not_alias_its_input():
    layer, x, state = setup()
    with torch.no_grad():
        chunk = x[:, :4].clone()
        chunk += layer(chunk, state=state)
        assert_close(layer(x[:, 4:], state=state), layer(x)[:, 4:], tolerance=TIGHT)


def test_the_state_does_not_alias_its_input_with_gradients():
    layer, x, state = setup()
    chunk = x[:, :4].clone()
    layer(chunk, state=state)
    chunk.zero_()
    assert_close(layer(x[:, 4:], state=state), layer(x)[:, 4:], tolerance=TIGHT)


def test_training_through_a_state_with_frozen_keys():
    layer, x, state = setup()
    layer.requires_grad_(False)
    layer.q_proj.requires_grad_()
    layer.v_proj.requires_grad_()
    chunks = torch.cat([layer(x[:, i : i + 5], state=state) for i in range(0, 20, 5)], dim=1)
    weights = [layer.q_proj.weight, layer.v_proj.weight]
    for a, e in zip(
        *(torch.autograd.grad(y.square().sum(), weights) for y in (chunks, layer(x))), strict=True
    ):
        assert_close(a, e, tolerance=TIGHT)


def test_a_failed_call_leaves_the_state_alone():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :5], state=state)
        layer.backend = "nope"
        for starts in (None, torch.tensor([0, 4, 5])):
            with pytest.raises(ValueError, match="unknown backend"):
                layer(x[:, 5:8], state=state, starts=starts)
        layer.backend = "auto"
        assert state.length == 5
        assert_close(layer(x[:, 5:], state=state), layer(x)[:, 5:], tolerance=TIGHT)


def test_a_state_must_fit_the_layer_and_its_precision():
    layer, x, _ = setup("R")
    with pytest.raises(ValueError, match="another configuration"):
        layer(x, state=setup("R-c")[2])
    with pytest.raises(ValueError, match="state is a list; it must be one state of this layer"):
        layer(x, state=[setup("R")[2]])
    layer, x, state = layer.float(), x.float(), layer.new_state(3)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x[:, :5], state=state)
    with pytest.raises(ValueError, match=r"the state holds torch.bfloat16 .* this call makes torch.float32"):
        layer(x[:, 5:], state=state)
    assert state.length == 5


def test_crop_to_nothing_forgets_starts():
    layer, x, state = setup()
    with torch.no_grad():
        layer(x[:, :6], state=state, starts=torch.tensor([0, 1, 2]))
        assert_close(layer(x, state=state.crop(0)), layer(x), tolerance=TIGHT)


def test_small_integers_as_starts():
    layer = HyperGLU(16, 300, rank=2)
    x = torch.randn(1, 300, 16)
    state = layer.new_state(1)
    with torch.no_grad():
        out = layer(x, state=state, starts=torch.tensor([3], dtype=torch.int8))
        assert_close(out, layer(x, starts=torch.tensor([3])), tolerance=1e-5)


def test_a_window_must_be_given_with_every_call():
    layer, x, state = setup()
    starts = (torch.arange(20) - 3).clamp(min=0).expand(3, -1)
    layer(x[:, :8], state=state, starts=starts[:, :8])
    with pytest.raises(ValueError, match="as a sliding window does, and none are given"):
        layer(x[:, 8:9], state=state)
    layer(x[:, 8:9], state=state, starts=starts[:, 8:9])


def test_detach_cuts_the_gradient():
    layer, x, state = setup()
    for first in (0, 10):
        layer(x[:, first : first + 10], state=state.detach()).sum().backward()
    assert "length=20" in repr(state)


@pytest.mark.thorough
def test_decoding_compiles_whole(compiler):
    layer, x, state = setup()
    compiled = compiler(layer, fullgraph=True)
    with torch.no_grad():
        layer(x[:, :9], state=state)
        assert_close(compiled(x[:, 9:10], state=state), layer(x)[:, 9:10], tolerance=TIGHT)
