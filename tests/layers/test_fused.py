"""The operator for a whole layer gives the numbers of the general path, where it applies."""

import pytest
import torch

from hypermlp import Mixer
from hypermlp.bench.measure import peak_bytes
from hypermlp.layers import fused, mixer
from hypermlp.ops import native
from hypermlp.testing import assert_close, randomise_

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}"
)
LABELS = ["G-cg-q-12o", "R-cg-q-12o", "G-12!", "R-1!", "G-cg-q", "R-g-q-2o"]
STARTS = [None, torch.tensor([0, 5]), (torch.arange(30) // 7 * 7).expand(2, -1)]
FEW, MANY = 2, 18  # sequences of 30 positions: up to 512 in all are projected panel by panel, more by blocks


def setup(label="G-cg-q-12o", dtype=torch.float64, batch=FEW, **settings):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=30, rank=3, **settings)).to(dtype)
    x = torch.randn(batch, 30, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return layer, x.requires_grad_()


def results(layer, x, starts):
    """The output with and without gradients, and all gradients."""
    out = layer(x, starts=starts)
    with torch.no_grad():
        inferred = layer(x, starts=starts)
    return [out, inferred, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("starts", STARTS, ids=["all", "padding", "documents"])
@pytest.mark.parametrize("batch", [FEW, MANY])
def test_it_equals_the_general_path(label, starts, batch, monkeypatch):
    layer, x = setup(label, batch=batch)
    if starts is not None:
        starts = starts.repeat_interleave(batch // 2, 0)
    assert fused.fuses(layer, x)
    actual = results(layer, x, starts)
    monkeypatch.setattr(mixer, "fuses", lambda *_: False)
    expected = results(layer, x, starts)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=1e-10, floor=1e-6)


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-g-q-2o"])
def test_a_larger_batch_changes_no_bit(label):
    layer = randomise_(Mixer.from_label(label, hidden_size=272, max_length=30, rank=3)).float()
    x = torch.randn(MANY, 30, 272, requires_grad=True)
    many = results(layer, x, None)
    few = results(layer, x[:FEW].detach().requires_grad_(), None)
    for name, a, e in zip(("output", "without gradients", "gradient of x"), few, many, strict=False):
        assert torch.equal(a, e[:FEW]), name


@pytest.mark.parametrize("batch", [3, 4])
def test_the_number_of_threads_changes_no_bit(batch):
    layer = randomise_(Mixer.from_label("G-cg-q-12o", hidden_size=80, max_length=150, rank=5)).float()
    x = torch.randn(batch, 150, 80, requires_grad=True)
    starts, found, before = torch.tensor([0, 20, 75, 1])[:batch], [], torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            found.append(results(layer, x, starts))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, e) for a, e in zip(other, found[0], strict=True))


def test_gradients_are_derivatives():
    layer, _ = setup()
    x = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))


def test_where_it_applies(monkeypatch):
    layer, x = setup()
    assert fused.fuses(layer, x)
    for label in ("R-p", "S", "R"):
        assert not fused.fuses(*setup(label))
    assert not fused.fuses(*setup(num_registers=2))
    assert not fused.fuses(*setup(dtype=torch.bfloat16))
    assert not fused.fuses(layer.float(), x)
    layer.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused.fuses(layer, x)
    for part in (layer.q_proj, layer.gates, layer.mix1):  # the operator does not call modules
        registers = (part.register_forward_hook, part.register_full_backward_hook)
        for register in registers:
            handle = register(lambda *_: None)
            assert not fused.fuses(layer, x)
            handle.remove()
    layer.q_proj.weight.requires_grad_(False)  # it would compute a gradient that nobody wants
    assert not fused.fuses(layer, x)
    with torch.no_grad():
        assert fused.fuses(layer, x)
    layer.q_proj.weight.requires_grad_(True)
    for backend in ("blocked", "reference"):
        layer.backend = backend
        assert not fused.fuses(layer, x)


def test_opcheck(monkeypatch):
    layer, x = setup()
    seen = []
    monkeypatch.setattr(fused, "call", lambda _, *arguments: seen.append(arguments) or (x,))
    layer(x, starts=STARTS[2])
    leaves = [
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in seen[0]
    ]
    checks = torch.library.opcheck(torch.ops.hypermlp.native_layer.default, tuple(leaves))
    assert set(checks.values()) == {"SUCCESS"}


def test_second_derivatives_are_refused():
    layer, x = setup()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_the_forward_pass_frees_what_it_does_not_need(monkeypatch):
    layer = Mixer.from_label("G-cg-q-12o", hidden_size=256, max_length=512)
    x = torch.randn(2, 512, 256)
    work = torch.no_grad()(lambda: layer(x))
    less = peak_bytes(work)
    monkeypatch.setattr(mixer, "fuses", lambda *_: False)
    assert less < 0.85 * peak_bytes(work)
