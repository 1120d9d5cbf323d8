"""A decoding state of fixed size gives the numbers of a growing one and of the full forward, with fixed
shapes and addresses.
"""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hypermlp import HyperGLU, Mixer
from hypermlp.label import PAPER_ROWS
from hypermlp.layers import build_mixer, static_state
from hypermlp.ops import ring
from hypermlp.testing import assert_close, assert_no_worse, randomise_

LENGTH, HIDDEN = 20, 16
TIGHT = 1e-10
SOME = ["G-cg-q-12o", "R-12!", "S-pc", "R-pcg-12!"]  # both layouts, every activation, RoPE, convolution


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def setup(label="G-cg-q-12o", batch=3, capacity=LENGTH, length=LENGTH, **settings):
    if "p" in label and label[0] == "G":  # RoPE turns pairs of channels: the narrow branches need two
        settings.setdefault("qk_width", 16)
    rollback = settings.pop("rollback", 128)
    layer = Mixer.from_label(label, hidden_size=HIDDEN, rank=3, **({"max_length": LENGTH} | settings))
    layer = randomise_(layer).double()
    x = torch.randn(batch, length, HIDDEN, dtype=torch.float64)
    return layer, x, layer.new_state(batch, capacity=capacity, rollback=rollback)


def in_chunks(layer, x, state, sizes, starts=None):
    outs, first = [], 0
    for chunk in x.split(sizes, dim=1):
        size = chunk.shape[1]
        rows = starts if starts is None or starts.dim() == 1 else starts[:, first : first + size]
        outs.append(layer(chunk, state=state, starts=rows))
        first += size
    return torch.cat(outs, dim=1)


def addresses(state):
    return [x.data_ptr() for x in (*state._rings.values(), state._counter)]


@pytest.mark.parametrize("label", PAPER_ROWS)
def test_every_label(label):
    layer, x, state = setup(label, capacity=LENGTH + 3)
    starts, sizes = torch.tensor([0, 4, 9]), [6, 1, 1, 5, 1, 6]
    expected = layer(x, starts=starts)
    growing = in_chunks(layer, x, layer.new_state(3), sizes, starts)
    assert_close(growing, expected, tolerance=TIGHT)
    assert_close(in_chunks(layer, x, state, sizes, starts), expected, tolerance=TIGHT)
    assert state.length == LENGTH


@pytest.mark.parametrize("label", SOME)
@pytest.mark.parametrize("window", [1, 4, 5])
def test_a_window_becomes_a_ring(label, window):
    """The stream is longer than the state and than the mixes."""
    length = 33
    starts = (torch.arange(length) - window + 1).clamp(min=0).expand(3, -1)
    for sizes in ([1] * length, [12] + [1] * 21, [2, 3] * 6 + [3]):
        capacity = window + max(sizes[1:]) - 1
        layer, x, state = setup(label, max_length=5, length=length, capacity=capacity)
        expected = layer(x, starts=starts)
        assert_close(in_chunks(layer, x, state, sizes, starts), expected, tolerance=TIGHT)
        assert state.keys.shape[1] == capacity


def test_unfilled_rows_influence_nothing():
    layer, x, state = setup()
    layer(x[:, :9], state=state)
    for cache in (state.keys, state.values):
        cache[:, 9:] = 1e6
    state.inputs[:, 9:] = 1e6
    rest = in_chunks(layer, x[:, 9:], state, [1, 1, 4, 1, 4])
    assert_close(rest, layer(x)[:, 9:], tolerance=TIGHT)


def test_rows_of_queries_come_in_blocks(monkeypatch):
    layer, x, state = setup()
    layer(x[:, :3], state=state)
    monkeypatch.setattr(ring, "MAX_CELLS", 3 * 4 * LENGTH * 4)  # four queries
    assert_close(layer(x[:, 3:], state=state), layer(x)[:, 3:], tolerance=TIGHT)


def test_addresses_stay():
    layer, x, state = setup()
    layer(x[:, :7], state=state)
    before = addresses(state)
    in_chunks(layer, x[:, 7:12], state, [1, 4])
    layer(x[:, 5:6], state=state.crop(5).reorder(torch.tensor([2, 2, 0])))
    assert addresses(state) == before


def test_crop_beyond_what_is_kept_is_refused():
    layer, x, state = setup(rollback=2)
    layer(x[:, :12], state=state)
    state.crop(11)
    with pytest.raises(ValueError, match=r"cannot crop to 9 of 11 .* needs 1 inputs .*rollback=3"):
        state.crop(9)
    state.crop(10)
    assert_close(layer(x[:, 10:], state=state), layer(x)[:, 10:], tolerance=TIGHT)
    with pytest.raises(ValueError, match="between 0 and 20"):
        state.crop(21)
    layer, x, state = setup("R", max_length=4, capacity=4)
    starts = (torch.arange(20) - 3).clamp(min=0).expand(3, -1)
    in_chunks(layer, x, state, [1] * 20, starts)
    with pytest.raises(ValueError, match=r"holds 4, and has overwritten .*capacity=20"):
        state.crop(19)


def test_half_precision_and_autocast():
    layer, x, _ = setup()
    layer.to(torch.bfloat16)
    x = x.bfloat16()
    out = in_chunks(layer, x, layer.new_state(3, capacity=LENGTH), [5] + [1] * 15)
    assert_no_worse(out, layer(x), copy.deepcopy(layer).double()(x.double()))
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        state = layer.new_state(3, capacity=LENGTH)
        in_chunks(layer, x.float(), state, [5] + [1] * 15)
    assert state.keys.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"the state holds torch.bfloat16 .* this call makes torch.float32"):
        layer(x[:, :1].float(), state=state.crop(LENGTH - 1))


def test_what_does_not_fit_is_refused_and_changes_nothing():
    layer, x, state = setup(capacity=8, max_length=12)
    with pytest.raises(ValueError, match="9 positions; the state holds 8"):
        layer(x[:, :9], state=state)
    layer(x[:, :7], state=state)
    with pytest.raises(
        ValueError, match=r"too many positions: got 8 .* allowed: positions below 8; .*capacity=n"
    ):
        layer(x[:, 7:9], state=state)
    with pytest.raises(ValueError, match="see more than the 8 positions that the state holds"):
        layer(x[:, 7:10], state=state, starts=torch.tensor([2, 1, 2]))
    assert state.length == 7
    starts = torch.tensor([0] * 7 + [2, 2, 2]).expand(3, -1)
    assert_close(
        layer(x[:, 7:10], state=state, starts=starts[:, 7:]),
        layer(x[:, :10], starts=starts)[:, 7:],
        tolerance=TIGHT,
    )
    layer(x[:, 10:11], state=state, starts=torch.tensor([[3]] * 3))
    with pytest.raises(ValueError, match="as a sliding window does, and none are given"):
        layer(x[:, 11:12], state=state)
    layer, x, state = setup(capacity=30, max_length=12)
    layer(x[:, :12], state=state)
    with pytest.raises(ValueError, match="positions below 12; max_length is 12"):
        layer(x[:, 12:13], state=state)


def test_layers_without_such_a_state():
    with pytest.raises(ValueError, match="num_registers=2 has no decoding state of fixed size"):
        HyperGLU(16, 8, num_registers=2).new_state(1, capacity=8)
    with pytest.raises(ValueError, match="LinearAttention has no decoding state of fixed size"):
        build_mixer("linear", hidden_size=16, max_length=8).new_state(1, capacity=8)
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="capacity is"):
            HyperGLU(16, 8).new_state(1, capacity=bad)
    layer = HyperGLU(16, 8)
    with torch.enable_grad(), pytest.raises(ValueError, match="carries no gradients"):
        layer(torch.randn(1, 3, 16), state=layer.new_state(1, capacity=8))


@pytest.mark.parametrize("label", SOME)
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 4, 9])], ids=["whole", "padded"])
@pytest.mark.thorough
def test_100_tokens_take_one_compilation(label, starts, compiler):
    layer, x, state = setup(label, length=110, max_length=110, capacity=110)
    expected = layer(x, starts=starts)
    counter = CompileCounterWithBackend("aot_eager")  # traces everything; generates no code
    compiled = compiler(layer, fullgraph=True, backend=counter)
    layer(x[:, :10], state=state, starts=starts)
    before = addresses(state)
    outs = [compiled(x[:, i : i + 1], state=state) for i in range(10, 110)]
    assert counter.frame_count == 1
    assert addresses(state) == before
    assert_close(torch.cat(outs, dim=1), expected[:, 10:], tolerance=TIGHT)
    with pytest.raises(ValueError, match="too many positions|more than 110 positions"):
        compiled(x[:, :1], state=state)
    other = layer.new_state(3, capacity=110)  # another state needs no compilation of its own
    layer(x[:, :10], state=other, starts=starts)
    assert_close(compiled(x[:, 10:11], state=other), expected[:, 10:11], tolerance=TIGHT)
    assert counter.frame_count == 1


@pytest.mark.thorough
def test_generated_code_gives_the_same_numbers(compiler):
    layer, x, state = setup()
    compiled = compiler(layer, fullgraph=True)
    layer(x[:, :9], state=state)
    outs = [compiled(x[:, i : i + 1], state=state) for i in range(9, LENGTH)]
    assert_close(torch.cat(outs, dim=1), layer(x)[:, 9:], tolerance=TIGHT)


@pytest.mark.parametrize("label", SOME)
@pytest.mark.parametrize("padded", [False, True])
def test_no_step_waits_for_the_device(label, padded):
    """Meta tensors have no values: whatever asks for one raises."""
    with torch.device("meta"):
        layer = Mixer.from_label(label, hidden_size=16, max_length=20)
        state, x = layer.new_state(3, capacity=20), torch.randn(3, 8, 16)
        layer(x, state=state, starts=torch.zeros(3, dtype=torch.int64) if padded else None)
        assert layer(x[:, :1], state=state).shape == (3, 1, 16)
        state.reorder(torch.tensor([1, 0, 2]))
        with pytest.raises(RuntimeError):
            bool(state.length)


def test_the_checks_do_not_wait_for_the_device():
    past = torch.tensor(5, device="meta")
    positions = ring.ring_positions._init_fn(past, 2, 20, "")
    starts = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    assert ring.ring_starts._init_fn(starts, positions, 20, 20).shape == (3, 2)
    assert static_state._following_starts._init_fn(starts, past).shape == (3,)


def test_opcheck():
    past, starts = torch.tensor(5), torch.zeros(3, 2, dtype=torch.int64)
    for operator, arguments in (
        (torch.ops.hypermlp.ring_positions.default, (past, 2, 20, "")),
        (torch.ops.hypermlp.ring_starts.default, (starts, past + torch.arange(2), 20, 20)),
        (torch.ops.hypermlp.following_starts.default, (starts.expand(3, 2), past)),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}
