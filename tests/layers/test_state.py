"""A decoding state can be reordered, repeated, cropped, cloned and moved, and goes on exactly.

States that grow and states of fixed size have the same contract; test_static_state.py has what is special to
the latter.
"""

import pytest
import torch

from hypermlp import HyperGLU, Mixer
from hypermlp.testing import assert_close, randomise_

TIGHT = 1e-10
LENGTH = 20
SOME = ["G-cg-q-12o", "R-12!", "S-pc", "R-pcg-12!"]  # both layouts, every activation, RoPE, convolution
PADDING = torch.tensor([0, 4, 9])
DOCUMENTS = torch.tensor([[0] * 20, [0] * 4 + [4] * 16, [0] * 9 + [9] * 11])
every_state = pytest.mark.parametrize("capacity", [None, LENGTH], ids=["growing", "fixed"])


def setup(label="G-cg-q-12o", batch=3, capacity=None):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=LENGTH, rank=3)).double()
    x = torch.randn(batch, LENGTH, 16, dtype=torch.float64)
    return layer, x, layer.new_state(batch, capacity=capacity)


def in_chunks(layer, x, state, sizes, starts=None):
    """The outputs chunk by chunk; ``starts`` ``[B]`` is given to the first call only."""
    outs, first = [], 0
    for chunk in x.split(sizes, dim=1):
        last = first + chunk.shape[1]
        once = starts is None or starts.dim() == 1
        rows = (None if first else starts) if once else starts[:, first:last]
        outs.append(layer(chunk, state=state, starts=rows))
        first = last
    return torch.cat(outs, dim=1)


@every_state
@pytest.mark.parametrize("label", SOME)
@pytest.mark.parametrize("sizes", [[5] + [1] * 15, [3, 4, 5, 8], [1] * 20, [20]], ids=len)
@pytest.mark.parametrize("starts", [None, PADDING, DOCUMENTS], ids=["all", "padding", "documents"])
@torch.no_grad()
def test_any_chunks(label, sizes, starts, capacity):
    """Padding is given once, also where it exceeds the first call."""
    layer, x, state = setup(label, capacity=capacity)
    assert_close(in_chunks(layer, x, state, sizes, starts), layer(x, starts=starts), tolerance=TIGHT)


@every_state
@torch.no_grad()
def test_a_document_goes_on_when_no_starts_are_given(capacity):
    layer, x, state = setup(capacity=capacity)
    first = layer(x[:, :12], state=state, starts=DOCUMENTS[:, :12])
    rest = in_chunks(layer, x[:, 12:], state, [1, 1, 6])
    assert_close(torch.cat([first, rest], dim=1), layer(x, starts=DOCUMENTS), tolerance=TIGHT)


@every_state
@pytest.mark.parametrize("label", SOME)
@torch.no_grad()
def test_reorder_and_repeat(label, capacity):
    layer, x, state = setup(label, capacity=capacity)
    layer(x[:, :7], state=state, starts=PADDING.clamp(max=5))
    order = torch.tensor([2, 2, 0, 1])
    starts = PADDING.clamp(max=5)[order]
    new = layer(x[order, 7:12], state=state.reorder(order))
    assert_close(new, layer(x[order], starts=starts)[:, 7:12], tolerance=TIGHT)
    twice = x[order].repeat_interleave(2, dim=0)
    new = layer(twice[:, 12:13], state=state.repeat(2))
    assert_close(new, layer(twice, starts=starts.repeat_interleave(2))[:, 12:13], tolerance=TIGHT)
    assert state.batch_size == 8


@every_state
@pytest.mark.parametrize("label", SOME)
@pytest.mark.parametrize("kept", [0, 1, 2, 5, 12])
@torch.no_grad()
def test_crop_goes_back(label, kept, capacity):
    """Also to the starts of that position, and to none at all."""
    layer, x, state = setup(label, capacity=capacity)
    in_chunks(layer, x[:, :12], state, [7, 5], DOCUMENTS)
    state.crop(kept)
    assert state.length == kept
    rest = in_chunks(layer, x[:, kept:], state, [3, 1, LENGTH - kept - 4], DOCUMENTS[:, kept:])
    assert_close(rest, layer(x, starts=DOCUMENTS)[:, kept:], tolerance=TIGHT)
    assert_close(layer(x[:, :3], state=state.crop(0)), layer(x[:, :3]), tolerance=TIGHT)


@every_state
@torch.no_grad()
def test_crop_returns_to_the_starts_of_that_position(capacity):
    layer, x, state = setup(capacity=capacity)
    starts = torch.tensor([0] * 5 + [5] * 15).expand(3, -1)
    layer(x[:, :9], state=state, starts=starts[:, :9])
    state.crop(4)
    rest = [layer(x[:, 4:5], state=state), layer(x[:, 5:], state=state, starts=starts[:, 5:])]
    assert_close(torch.cat(rest, dim=1), layer(x, starts=starts)[:, 4:], tolerance=TIGHT)


@every_state
@torch.no_grad()
def test_a_clone_is_independent(capacity):
    layer, x, state = setup(capacity=capacity)
    layer(x[:, :7], state=state)
    branch = state.clone()
    in_chunks(layer, x.flip(1)[:, :5], branch, [1] * 5)
    assert (state.length, branch.length) == (7, 12)
    assert_close(layer(x[:, 7:], state=state), layer(x)[:, 7:], tolerance=TIGHT)


@every_state
@torch.no_grad()
def test_moved_and_cast(capacity):
    layer, x, state = setup(capacity=capacity)
    layer(x[:, :7], state=state)
    single = state.clone().to(torch.float32)
    assert single.keys.dtype == torch.float32
    out = layer.float()(x[:, 7:].float(), state=single)
    assert_close(out, layer.double()(x)[:, 7:], tolerance=1e-4)
    assert state.to("meta").keys.device.type == "meta"


@every_state
def test_modes_can_change_between_steps(capacity):
    """Inference mode, no_grad and, on a state that grows, training steps may follow each other."""
    layer, x, state = setup(capacity=capacity)
    with torch.inference_mode():
        layer(x[:, :4], state=state)
        layer(x[:, 4:6], state=state)
    with torch.no_grad():
        layer(x[:, 6:8], state=state)
    with torch.set_grad_enabled(capacity is None):
        out = layer(x[:, 8:10], state=state)
    if capacity is None:
        out.sum().backward()
    with torch.no_grad():
        assert_close(layer(x[:, 10:], state=state), layer(x)[:, 10:], tolerance=TIGHT)


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
