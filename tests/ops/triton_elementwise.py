"""The kernels of the convolution pair and of the gates, in Triton's interpreter.

tests/ops/test_triton_elementwise.py runs this file in a process of its own, because TRITON_INTERPRET=1 has to
be set before anything imports Triton:

    TRITON_INTERPRET=1 python -m pytest tests/ops/triton_elementwise.py
"""

import pytest
import torch
import triton.runtime.interpreter as interpreter

from hypermlp import Mixer
from hypermlp.ops.api import causal_conv_pair
from hypermlp.ops.gating import triton_gating
from hypermlp.ops.triton import elementwise, interpreting
from hypermlp.ops.triton.launch import empty, recording
from hypermlp.testing import assert_close, assert_no_worse, randomise_

GUARD, CANARY = 64, 12345.0
FLOAT32 = 2e-6


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CONV_SHAPES = [  # batch, rows, positions, width, taps
    (1, 1, 1, 1, 4),
    (2, 7, 5, 3, 4),
    (2, 3, 3, 5, 1),
    (3, 20, 17, 130, 4),
    (1, 70, 70, 6, 3),
    (1, 133, 130, 2, 5),
    (2, 4, 1, 16, 4),
]
GATE_SIZES = [(12, 20, 6, 3), (12, 20, 0, 0), (0, 0, 6, 3), (0, 0, 0, 5), (300, 70, 33, 1)]


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Fill every result with NaN and surround it with canaries, which must live."""
    assert interpreting()
    buffers = []

    def guarded_empty(name, like, size, dtype):
        room = torch.full((GUARD + size + GUARD,), CANARY, dtype=dtype)
        room[GUARD : GUARD + size] = torch.nan
        buffers.append((name, room))
        return room[GUARD : GUARD + size]

    monkeypatch.setattr(elementwise, "empty", guarded_empty)
    yield buffers
    for name, room in buffers:
        for edge in (room[:GUARD], room[-GUARD:]):
            assert (edge == torch.tensor(CANARY, dtype=room.dtype)).all(), f"{name}: written beyond its end"


def conv_inputs(shape, dtype=torch.float64):
    batch, rows, _, width, taps = shape
    sizes = ((batch, rows, width), (width, taps), (width, taps))
    return [torch.randn(*size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def conv_with_gradients(inputs, length, reach, backend):
    inputs = [x.detach().requires_grad_() for x in inputs]
    outs = causal_conv_pair(*inputs, length, reach, backend=backend)
    cotangents = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, inputs, cotangents)]


@pytest.mark.parametrize("with_reach", [False, True])
@pytest.mark.parametrize("shape", [*CONV_SHAPES[:2], *map(slow, CONV_SHAPES[2:])], ids=str)
def test_convolution(shape, with_reach, guarded):
    batch, _, length, _, taps = shape
    reach = torch.randint(0, taps + 2, (batch, length)) if with_reach else None
    inputs = conv_inputs(shape)
    exact = conv_with_gradients(inputs, length, reach, "reference")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        actual = conv_with_gradients([x.to(dtype) for x in inputs], length, reach, "triton")
        for a, e in zip(actual, exact, strict=True):
            assert_close(a, e, tolerance=tolerance, floor=1e-3)
    assert guarded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolution_in_half_precision(dtype):
    shape = (2, 20, 17, 18, 4)
    inputs = conv_inputs(shape, dtype)
    reach = torch.randint(0, 6, (2, 17))
    exact = conv_with_gradients([x.double() for x in inputs], 17, reach, "reference")
    plain, actual = (conv_with_gradients(inputs, 17, reach, name) for name in ("reference", "triton"))
    for each in zip(actual, plain, exact, strict=True):
        assert_no_worse(*each)


def test_convolution_of_other_strides_and_dtypes():
    x, w1, w2 = conv_inputs((2, 12, 9, 6, 4), torch.float32)
    expected = causal_conv_pair(x, w1, w2, 9, backend="reference")
    wide = torch.cat([x, x], dim=2)[:, :, :6]
    turned = x.detach().mT.contiguous().mT
    for other in (wide, turned):
        for a, e in zip(causal_conv_pair(other, w1, w2, 9, backend="triton"), expected, strict=True):
            assert_close(a, e, tolerance=FLOAT32)
    half = [y.to(torch.float16) for y in expected]
    found = causal_conv_pair(x.to(torch.float16), w1, w2, 9, backend="triton")  # weights stay float32
    for a, e in zip(found, half, strict=True):
        assert a.dtype == torch.float16
        assert_close(a, e, tolerance=4e-3)


def test_programs_of_the_convolution_are_independent(monkeypatch):
    """Programs in reverse order give the same bits: none reads what another one writes."""
    inputs = conv_inputs((2, 70, 67, 130, 4), torch.float32)
    before = conv_with_gradients(inputs, 67, None, "triton")
    builder, moved = interpreter.interpreter_builder, []
    right = builder.set_grid_idx

    def mirrored(*place):
        other = [size - 1 - i for size, i in zip(builder.grid_dim, place, strict=True)]
        moved.append(tuple(other) != place)
        right(*other)

    monkeypatch.setattr(builder, "set_grid_idx", mirrored)
    for a, e in zip(conv_with_gradients(inputs, 67, None, "triton"), before, strict=True):
        assert torch.equal(a, e)
    assert sum(moved) > 10


def plain_gates(logits, q, sizes):
    query, output, mix1, mix2 = torch.sigmoid(logits).split(sizes, dim=-1)
    return [q * query, output, mix1, mix2]


def gates_with_gradients(run, logits, q, sizes):
    logits, q = (x.detach().requires_grad_() for x in (logits, q))
    outs = run(logits, q, sizes)
    cotangents = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, [logits, q], cotangents)]


@pytest.mark.parametrize("sizes", GATE_SIZES, ids=str)
@pytest.mark.parametrize("lead", [(1, 1), (2, 7)])
def test_gates(lead, sizes):
    sizes = list(sizes)
    logits = 4 * torch.randn(*lead, sum(sizes), dtype=torch.float64)
    q = torch.randn(*lead, sizes[0], dtype=torch.float64)
    exact = gates_with_gradients(plain_gates, logits, q, sizes)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, FLOAT32)):
        given = logits.to(dtype), q.to(dtype)
        actual = gates_with_gradients(triton_gating.gate_queries, *given, sizes)
        for a, e in zip(actual, exact, strict=True):
            assert_close(a, e, tolerance=tolerance, floor=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_in_half_precision(dtype):
    sizes = [12, 20, 6, 3]
    logits, q = torch.randn(2, 7, 41).to(dtype), torch.randn(2, 7, 12).to(dtype)
    exact = gates_with_gradients(plain_gates, logits.double(), q.double(), sizes)
    plain = gates_with_gradients(plain_gates, logits, q, sizes)
    actual = gates_with_gradients(triton_gating.gate_queries, logits, q, sizes)
    for each in zip(actual, plain, exact, strict=True):
        assert_no_worse(*each)


def test_extreme_logits_are_finite():
    logits = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, 3.0]])
    sizes = [2, 2, 1, 1]
    actual = gates_with_gradients(triton_gating.gate_queries, logits, torch.ones(1, 2), sizes)
    for a, e in zip(actual, gates_with_gradients(plain_gates, logits, torch.ones(1, 2), sizes), strict=True):
        assert_close(a, e, tolerance=FLOAT32, floor=1e-6)


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
    logits, q = torch.randn(1, 3, 11, requires_grad=True), torch.randn(1, 3, 4)
    for i in range(4):
        expected = torch.autograd.grad(plain_gates(logits, q, [4, 4, 2, 1])[i].sum(), logits)[0]
        actual = torch.autograd.grad(triton_gating.gate_queries(logits, q, [4, 4, 2, 1])[i].sum(), logits)[0]
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
    x, w1, w2 = conv_inputs((1, 4, 3, 2, 2))
    logits, q = torch.randn(2, 7, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    checks = [
        torch.library.opcheck(torch.ops.hypermlp.triton_conv_pair.default, (x, w1, w2, 3, None)),
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
