"""The contract of the layer, for all of the paper's labels on every backend:

one computation, however it is cut.
"""

import itertools

import pytest
import torch

from hypermlp import Mixer, MixerConfig
from hypermlp.label import PAPER_ROWS, PROBABLE_READING
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.testing import assert_close, assert_no_worse, randomise_

LABELS = [*PAPER_ROWS, *PROBABLE_READING.values()]
LENGTH, HIDDEN = 11, 16
TIGHT = 1e-10
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def refusal(label, backend):
    """Why the backend does not compute the operator of a label; None if it does."""
    config = MixerConfig.from_label(label, hidden_size=64, max_length=LENGTH)
    mixed = config.mix1 or config.mix2
    return BACKENDS[backend.split(",")[0]].refusal(
        Request("attention", "cpu", torch.float64, config.activation, mixed)
    )


BACKEND_RUNS = [*BACKENDS, "native, 1 thread"]
PAIRS = [(label, name) for label in LABELS for name in BACKEND_RUNS if refusal(label, name) is None]
every_pair = pytest.mark.parametrize(("label", "backend"), PAIRS, indirect=["backend"])


def build(label, backend="auto", dtype=torch.float64, max_length=LENGTH, **settings):
    if "p" in label and label[0] == "G":  # RoPE turns pairs of channels: the narrow branches need two
        settings.setdefault("qk_width", 16)
    layer = Mixer.from_label(label, hidden_size=HIDDEN, max_length=max_length, rank=3, **settings)
    layer.backend = backend
    return randomise_(layer).to(dtype)


def data(batch=2, length=LENGTH, seed=3):
    return torch.randn(
        batch, length, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def with_gradients(layer, x, call):
    """The output of ``call(x)`` and the gradients of x and all parameters, for a fixed cotangent of the same
    shape as x.
    """
    x = x.clone().requires_grad_()
    out = call(x)
    cotangent = data(*x.shape[:2], seed=4).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


def assert_all_close(actual, expected, tolerance=TIGHT):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, e, tolerance=tolerance, what=f"tensor {i}")


def in_chunks(layer, x, sizes, starts=None):
    state = layer.new_state(batch_size=x.shape[0])
    outs, first = [], 0
    for size in sizes:
        rows = starts if starts is None or starts.dim() == 1 else starts[:, first : first + size]
        outs.append(layer(x[:, first : first + size], state=state, starts=rows))
        first += size
    return torch.cat(outs, dim=1)


@every_pair
def test_backends_agree(label, backend):
    x = data()
    layers = [build(label, name) for name in (backend, "reference")]
    assert_all_close(*(with_gradients(layer, x, layer) for layer in layers))


@pytest.mark.thorough
@pytest.mark.parametrize("label", LABELS)
def test_compiles_whole(label, compiler):
    layer, x = build(label), data()  # the fastest backend; the others: tests/ops/test_library.py
    compiled = compiler(
        layer, fullgraph=True, backend="aot_eager"
    )  # traces forward and backward; generates no code
    assert_all_close(with_gradients(layer, x, compiled), with_gradients(layer, x, layer))


@every_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_the_definition(label, dtype, backend):
    x = data().to(dtype)
    exact_layer = build(label, "reference", dtype).double()
    exact = exact_layer(x.double())
    plain, actual = (build(label, name, dtype)(x) for name in ("reference", backend))
    assert_no_worse(actual, plain, exact)


@pytest.mark.thorough
@every_pair
def test_prefill_then_decode_at_every_split(label, backend):
    layer, x = build(label, backend), data()
    full = with_gradients(layer, x, layer)
    for split in range(1, LENGTH):
        chunks = [split] + [1] * (LENGTH - split)
        assert_all_close(with_gradients(layer, x, lambda x, chunks=chunks: in_chunks(layer, x, chunks)), full)
    with torch.no_grad():  # without gradients the state is written in place
        assert_close(in_chunks(layer, x, [4] + [1] * (LENGTH - 4)), full[0], tolerance=TIGHT)


@every_pair
@pytest.mark.parametrize("sizes", [(11,), (1,) * 11, (2, 3, 6), (5, 1, 5), (1, 10), (3, 4, 1, 1, 2)])
def test_chunked_prefill(label, backend, sizes):
    layer, x = build(label, backend), data()
    with torch.no_grad():
        assert_close(in_chunks(layer, x, sizes), layer(x), tolerance=TIGHT)


@every_pair
def test_left_padding_changes_nothing(label, backend):
    layer, x = build(label, backend), data(batch=3)
    starts = torch.tensor([0, 4, 9])
    poisoned = x.clone()
    for b, start in enumerate(starts):
        poisoned[b, :start] = torch.nan
    padded = with_gradients(layer, x, lambda x: layer(x, starts=starts))
    assert_close(layer(poisoned, starts=starts), padded[0], tolerance=0)
    with torch.no_grad():
        assert_close(in_chunks(layer, x, (3, 3, 1, 1, 3), starts), padded[0], tolerance=TIGHT)
    for b, start in enumerate(starts.tolist()):
        alone = x[b : b + 1, start:].clone().requires_grad_()
        out = layer(alone)
        assert_close(padded[0][b : b + 1, start:], out, tolerance=TIGHT)
        assert (padded[0][b, :start] == 0).all()
        grad = torch.autograd.grad(out, alone, data(3, LENGTH, seed=4)[b : b + 1, start:])[0]
        assert_close(padded[1][b : b + 1, start:], grad, tolerance=TIGHT)
        assert (padded[1][b, :start] == 0).all()


def assert_packed_documents_are_separate(layer):
    x = data()
    cuts = [[0, 3, 4, 9, LENGTH], [0, 6, LENGTH]]
    starts = torch.tensor([[max(c for c in row[:-1] if c <= t) for t in range(LENGTH)] for row in cuts])
    out, grad = with_gradients(layer, x, lambda x: layer(x, starts=starts))[:2]
    with torch.no_grad():
        assert_close(in_chunks(layer, x, (2, 5, 1, 3), starts), out, tolerance=TIGHT)
    for b, row in enumerate(cuts):
        for first, last in itertools.pairwise(row):
            document = x[b : b + 1, first:last].clone().requires_grad_()
            alone = layer(document)
            assert_close(out[b : b + 1, first:last], alone, tolerance=TIGHT)
            expected = torch.autograd.grad(alone, document, data(seed=4)[b : b + 1, first:last])[0]
            assert_close(grad[b : b + 1, first:last], expected, tolerance=TIGHT)


@every_pair
def test_packed_documents_are_separate(label, backend):
    assert_packed_documents_are_separate(build(label, backend))


def assert_a_window_runs_past_max_length(layer):
    """Compare windows of four positions, in one call, in chunks and each alone.

    A convolution reaches further back than the window, so a layer with one is not given its windows alone.
    """
    x = data()
    starts = (torch.arange(LENGTH) - 3).clamp(min=0).expand(2, -1)
    with torch.no_grad():
        windowed = layer(x, starts=starts)
        assert_close(in_chunks(layer, x, [3] + [1] * 8, starts), windowed, tolerance=TIGHT)
        if not layer.config.conv:
            for t in range(LENGTH):
                assert_close(windowed[:, t], layer(x[:, max(0, t - 3) : t + 1])[:, -1], tolerance=TIGHT)


@every_pair
def test_a_window_runs_past_max_length(label, backend):
    assert_a_window_runs_past_max_length(build(label, backend, max_length=4))


@pytest.mark.parametrize("backend", ["native", "blocked", "reference", "native, 1 thread"], indirect=True)
def test_the_convolution_sees_nothing_before_its_own_start(backend):
    layer, x = build("R-cg-q-12o", backend), data()
    starts = torch.tensor([0] * 5 + [5] * 6).expand(2, -1)
    other = torch.cat([data(length=5, seed=9), x[:, 5:]], dim=1)
    assert_close(layer(other, starts=starts)[:, 5:], layer(x, starts=starts)[:, 5:], tolerance=0)


@every_pair
def test_causal(label, backend):
    layer, x = build(label, backend), data()
    changed = torch.cat([x[:, :7], data(seed=8)[:, 7:]], dim=1)
    assert_close(layer(changed)[:, :7], layer(x)[:, :7], tolerance=0)


@every_pair
def test_same_seed_same_bits(label, backend):
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        layer = Mixer.from_label(label, hidden_size=32, max_length=LENGTH)
        layer.backend = backend
        results.append(with_gradients_float32(layer))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def with_gradients_float32(layer):
    x = torch.randn(2, LENGTH, 32, requires_grad=True)
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def test_every_label_meets_every_backend_that_computes_it():
    """The pairs above really range over the whole table, and a refused pair raises instead of running
    elsewhere.
    """
    assert len(LABELS) == 35
    for label in LABELS:
        able = {name for name in BACKENDS if refusal(label, name) is None}
        plain_softmax = label[0] == "S"  # no softmax label of the paper has mixes
        assert able == {"blocked", "reference", "sdpa" if plain_softmax else "native"}, label
        for name in set(BACKENDS) - able:
            with pytest.raises(ValueError, match=f"backend '{name}' is not available"):
                build(label, name)(data())
