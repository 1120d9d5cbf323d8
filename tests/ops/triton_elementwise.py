"""The kernels around the operator in Triton's interpreter: convolutions, gates, decoding step.

tests/ops/test_triton.py runs this file in a process of its own; conftest.py sets guards:

    TRITON_INTERPRET=1 python -m pytest tests/ops/triton_elementwise.py
"""

import pytest
import torch

from hypermlp import Mixer
from hypermlp.ops import contract
from hypermlp.ops.gating import triton_gating
from hypermlp.ops.triton import elementwise
from hypermlp.ops.triton.launch import empty, recording
from hypermlp.testing import assert_close, randomise_

FLOAT32 = 2e-6


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CONVOLUTIONS = [  # batch, positions, earlier positions, width, taps
    *((1, 1, 0, 1, 4), (2, 5, 2, 3, 4), (2, 17, 3, 18, 4)),
    *map(slow, ((2, 3, 0, 5, 1), (3, 17, 3, 130, 4), (1, 70, 0, 6, 3), (1, 130, 3, 2, 5), (2, 1, 3, 16, 4))),
]
GATES = [(12, 20, 6, 3), (12, 20, 0, 0), (0, 0, 6, 3), (0, 0, 0, 5), (300, 70, 33, 1)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: FLOAT32, torch.bfloat16: None, torch.float16: None}


def check(case, interpreted):
    """Check a case in every dtype; kernels must have used guarded memory."""
    for dtype, tolerance in TOLERANCES.items():
        contract.check(case, "triton", dtype, tolerance=tolerance)
    assert interpreted


@pytest.mark.parametrize("reach", [False, True])
@pytest.mark.parametrize("sizes", CONVOLUTIONS, ids=str)
def test_convolution(sizes, reach, interpreted):
    check(contract.convolution(*sizes, reach=reach), interpreted)


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_convolutions(count, interpreted):
    check(contract.convolution(2, 5, 2, 3, 4, count=count), interpreted)


@pytest.mark.parametrize("sizes", GATES, ids=str)
@pytest.mark.parametrize("positions", [(1, 1), (2, 7)])
def test_gates(sizes, positions, interpreted):
    check(contract.gates(sizes, positions), interpreted)


def strided(case, change):
    """The case with another layout of its first tensor in memory."""

    def compute(backend, first, *rest):
        changed = change(first)
        assert not changed.is_contiguous()
        return case.compute(backend, changed, *rest)

    return case._replace(compute=compute)


@pytest.mark.parametrize(
    "change", [lambda x: torch.cat([x, x], dim=2)[:, :, :6], lambda x: x.mT.contiguous().mT]
)
def test_convolution_of_other_strides(change):
    case = strided(contract.convolution(2, 9, 3, 6), change)
    contract.check(case, "triton", torch.float32, tolerance=FLOAT32)


def test_convolution_keeps_weights_in_float32():
    case = contract.convolution(2, 9, 3, 6)
    x, *weights = (tensor.float() for tensor in case.tensors.values())
    expected = case.compute("reference", x, *weights)
    for actual, e in zip(case.compute("triton", x.half(), *weights), expected, strict=True):
        assert actual.dtype == torch.float16
        assert_close(actual, e, tolerance=4e-3)


def test_extreme_logits_are_finite():
    case = contract.gates((2, 2, 1, 1), (1,))
    logits = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 3.0]])
    case = case._replace(tensors={"logits": logits.double(), "q": torch.ones(1, 2, dtype=torch.float64)})
    contract.check(case, "triton", torch.float32, tolerance=FLOAT32)


@pytest.mark.parametrize("size", [1, 1024, 1500])
def test_the_output_gate(size):
    a, b = torch.randn(1, size, dtype=torch.float64), torch.rand(1, size, dtype=torch.float64)
    results = []
    for run in (triton_gating.gate_output, torch.mul):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = run(x, y)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, y])])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, tolerance=1e-12)


def test_only_one_gate_has_a_gradient():
    case = contract.gates((4, 4, 2, 1), (3,))
    logits, q = (x.float().requires_grad_() for x in case.tensors.values())
    for i in range(4):
        actual, expected = (
            torch.autograd.grad(case.compute(backend, logits, q)[i].sum(), logits)[0]
            for backend in ("triton", "reference")
        )
        assert_close(actual, expected, tolerance=FLOAT32)


@pytest.mark.parametrize("label", ["R-c-1!", *map(slow, ("G-cg-q-12o", "R-g-q", "R-pcg-2!"))])
def test_a_whole_layer(label):
    results = []
    for backend in ("triton", "reference"):
        layer = randomise_(Mixer.from_label(label, hidden_size=32, max_length=6, rank=3)).double()
        layer.backend = backend
        x = torch.linspace(-1, 1, 2 * 5 * 32, dtype=torch.float64).view(2, 5, 32).sin().requires_grad_()
        out = layer(x, starts=torch.tensor([0, 2]))
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, tolerance=1e-10)


@pytest.mark.parametrize("label", ["R-12!", slow("G-cg-q-12o")])  # both layouts
def test_decoding_with_a_state_of_fixed_size(label):
    """A window of 4 in a ring of 5 rows, which wraps; the first sequence is padded."""
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=4, rank=2)).double()
    x = torch.linspace(-3, 3, 2 * 9 * 16, dtype=torch.float64).view(2, 9, 16).sin()
    starts = torch.stack([(torch.arange(9) - 3).clamp(min=0), torch.arange(9).clamp(max=2)])
    starts = torch.maximum(starts, (torch.arange(9) - 3).clamp(min=0))
    layer.backend = "reference"
    with torch.no_grad():
        expected = layer(x, starts=starts)
        layer.backend = "triton"
        state = layer.new_state(2, capacity=5)
        outs = [layer(part, state=state, starts=s) for part, s in split(x, starts, [3, 1, 1, 1, 1, 1, 1])]
    assert_close(torch.cat(outs, dim=1), expected, tolerance=1e-10)


@pytest.mark.parametrize(
    ("label", "rollback"), [("G-cg-q-12o", 0), *(slow(*case) for case in (("R-c-1!", 5), ("R-12!", 0)))]
)
@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.bfloat16)])
def test_a_fused_step(label, rollback, dtype):
    """One operator for the step: the same as the whole sequence, with and without padding."""
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=8, rank=2)).to(dtype)
    x = torch.linspace(-3, 3, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16).sin().to(dtype)
    for starts in (None, torch.tensor([0, 2])):
        with torch.no_grad(), recording() as record:
            layer.backend = "triton"
            state = layer.new_state(2, capacity=8, rollback=rollback)
            outs = [layer(x[:, :3], state=state, starts=starts)]
            outs += [layer(x[:, i : i + 1], state=state) for i in range(3, 6)]
            layer.backend = "reference"
            expected = layer.to(torch.float64)(x.double(), starts=starts)
            layer.to(dtype)
        assert sum(one.name == "step_gates" for one in record.launches) == 3
        tolerance = 1e-10 if dtype == torch.float64 else 0.03
        assert_close(torch.cat(outs, dim=1), expected, tolerance=tolerance)


def split(x, starts, sizes):
    return zip(x.split(sizes, dim=1), starts.split(sizes, dim=1), strict=True)


def test_opcheck_and_second_derivatives(monkeypatch):
    monkeypatch.setattr(elementwise, "empty", empty)  # opcheck compares where results begin in memory
    x, w1, w2 = (tensor.requires_grad_() for tensor in contract.convolution(1, 3, 1, 2, 2).tensors.values())
    logits, q = torch.randn(2, 7, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    checks = [
        torch.library.opcheck(torch.ops.hypermlp.triton_conv.default, (x, [w1, w2], 3, None)),
        torch.library.opcheck(torch.ops.hypermlp.triton_gates.default, (logits, q, [3, 2, 1, 1])),
        torch.library.opcheck(torch.ops.hypermlp.triton_product.default, (q, q.detach().clone())),
    ]
    for check in checks:
        assert set(check.values()) == {"SUCCESS"}
    grad = torch.autograd.grad(
        triton_gating.gate_queries(logits, q, [3, 2, 1, 1])[0].sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad[0].sum().backward()
