"""Decoding steps in bfloat16 and float16, with rotations and registers, on any number of threads."""

import pytest
import torch

from hypermlp import Mixer
from hypermlp.layers.fast import fast_path
from hypermlp.layers.visibility import Visibility
from hypermlp.ops import native
from hypermlp.testing import assert_close, assert_no_worse, randomise_

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}"
)
LENGTH = 23
HALF = [torch.bfloat16, torch.float16]
LABELS = ["G-cg-q-12o", "R-cg-q-12o", "R-p", "R-pcg-q-12o", "G-12!", "R"]
WINDOW = (torch.arange(LENGTH) - 6).clamp(min=0).expand(3, -1)
DOCUMENTS = torch.tensor([[0] * 9 + [9] * 14, [0] * LENGTH, [0, 1] + [2] * 21])
STARTS = {"all": None, "padding": torch.tensor([0, 4, 20]), "documents": DOCUMENTS, "window": WINDOW}


def build(label, dtype, *, hidden=20, **settings):
    settings = {"compression": 1, "rank": 5, "init_std": 0.2} | settings
    layer = Mixer.from_label(label, hidden_size=hidden, max_length=LENGTH, **settings)
    return randomise_(layer).to(dtype)


def data(dtype, batch=3, hidden=20):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, LENGTH, hidden, dtype=torch.float64, generator=generator).to(dtype)


def is_taken(layer, x, state):
    visibility = Visibility(None, past=0, new=x.shape[1], device=x.device)
    return fast_path(layer, x, state, visibility) is not None


@torch.no_grad()
def decoded(layer, x, starts=None, chunks=(6, 1, 4, 1, 2, 1, 1, 3, 1, 1, 1, 1)):
    """The outputs chunk by chunk; all but the first take the kernel."""
    state, outs, first = layer.new_state(x.shape[0]), [], 0
    for size in chunks:
        new = x[:, first : first + size]
        assert first == 0 or is_taken(layer, new, state)
        rows = starts if starts is None or starts.dim() == 1 else starts[:, first : first + size]
        outs.append(layer(new, state=state, starts=rows))
        first += size
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("label", LABELS)
def test_a_step_in_half_precision_is_no_worse_than_the_definition(label, starts, registers, dtype):
    layer, x, starts = build(label, dtype, num_registers=registers), data(dtype), STARTS[starts]
    actual = decoded(layer, x, starts)
    layer.backend = "reference"
    with torch.no_grad():
        plain = layer(x, starts=starts)
        exact = layer.double()(x.double(), starts=starts)
    assert actual.dtype == dtype
    assert_no_worse(actual, plain, exact)


@pytest.mark.parametrize("registers", [0, 1, 5])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("label", LABELS)
def test_a_step_equals_the_whole_sequence(label, starts, registers):
    layer, x, starts = (
        build(label, torch.float64, num_registers=registers),
        data(torch.float64),
        STARTS[starts],
    )
    actual = decoded(layer, x, starts)
    layer.backend = "reference"
    with torch.no_grad():
        assert_close(actual, layer(x, starts=starts), tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("sizes", [(1, 1, 3), (2, 1, 7), (8, 16, 16), (18, 33, 17)], ids=str)
def test_odd_sizes(sizes, dtype):
    """Widths of queries and values that fill vectors, and that do not, at every length from 1 on."""
    qk_dim, vo_dim, rank = sizes
    widths = {"qk_width": 4 * qk_dim, "vo_width": 2 * vo_dim, "rank": rank}
    layer, x = build("G-cg-q-12o", dtype, hidden=12, **widths), data(dtype, hidden=12)
    actual = decoded(layer, x, chunks=(1,) * LENGTH)
    layer.backend = "reference"
    with torch.no_grad():
        plain, exact = layer(x), layer.double()(x.double())
    if dtype == torch.float64:
        assert_close(actual, exact, tolerance=1e-10)
    else:
        assert_no_worse(actual, plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-pcg-q-12o"])
def test_the_number_of_threads_changes_no_bit(label, dtype, set_threads):
    layer = randomise_(Mixer.from_label(label, hidden_size=256, max_length=460, num_registers=3), scale=0.05)
    layer = layer.to(dtype)
    x = torch.randn(3, 460, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    with torch.no_grad():
        state = layer.new_state(3)
        layer(x[:, :450], state=state)
        for threads in (1, 2, 4, 8):
            set_threads(threads)
            own = state.clone()
            results.append([layer(x[:, i : i + 1], state=own) for i in range(450, 460)])
    for other in results[1:]:
        for a, e in zip(other, results[0], strict=True):
            assert torch.equal(a, e)
