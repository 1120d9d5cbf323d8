"""The contract of the operator, over every backend:

outputs and all gradients equal the definition's, whatever the shapes.
"""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hypermlp.ops import Mix, hyper_attention
from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.contract import TENSORS
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.ops.inputs import PATTERNS, starts_of
from hypermlp.ops.reference import trace
from hypermlp.ops.triton import interpreting
from hypermlp.testing import OpInputs, assert_close, assert_no_worse, op_inputs

ACTIVATIONS = ("relu", "glu", "softmax")
MIXES = ("", "1", "2", "12")
LAYOUTS = ("lag", "forward")
VARIANTS = [(a, m, lay) for a, m, lay in itertools.product(ACTIVATIONS, MIXES, LAYOUTS) if m or lay == "lag"]
TIGHT = 1e-10
SEVERAL, MANY = (20, 23) if interpreting() else (70, 150)  # queries
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # by Triton's interpreter
]


def refused(backend, activation, mixes, dtype=torch.float64):
    """A backend may refuse a case, if it does so with a reason; no other backend may run in its place."""
    request = Request("attention", "cpu", dtype, activation, bool(mixes))
    reason = BACKENDS[backend].refusal(request)
    if reason is None:
        return False
    inputs = op_inputs(queries=3, activation=activation, mixes=mixes, dtype=dtype)
    with pytest.raises(ValueError, match=f"backend {backend!r} is not available: {reason}"):
        hyper_attention(*inputs, activation=activation, backend=backend)
    return True


def example(backend, **sizes):
    """Inputs and options of a case that the backend computes: HyperGLU's, or softmax without mixes."""
    activation, mixes = ("softmax", "") if backend == "sdpa" else ("glu", "12")
    return op_inputs(activation=activation, mixes=mixes, **sizes), {
        "activation": activation,
        "backend": backend,
    }


def run(inputs: OpInputs, function=hyper_attention, **settings):
    """Output, and the gradients of all tensors for a fixed random cotangent."""
    inputs = inputs.to(inputs.q.dtype).requires_grad()
    out = function(*inputs, **settings)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        out.dtype
    )
    return [out, *torch.autograd.grad(out, inputs.tensors(), cotangent)]


def assert_all_close(actual, expected, tolerance=TIGHT):
    for name, a, e in zip(("output", *TENSORS), actual, expected, strict=False):
        # the floor: one visible slot has a normalised score of exactly 1, whose gradient is all cancellation
        assert_close(a, e, tolerance=tolerance, floor=1e-3, what=name)
    assert len(actual) == len(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("activation", "mixes", "layout"), VARIANTS)
def test_every_backend_equals_the_reference(backend, activation, mixes, layout, pattern):
    if refused(backend, activation, mixes):
        return
    for queries, keys in ((1, 1), (13, 13), (1, 11), (6, 17), (SEVERAL, SEVERAL)):
        inputs = op_inputs(queries=queries, keys=keys, activation=activation, mixes=mixes)
        starts = starts_of(pattern, batch=2, queries=queries, keys=keys)
        options = {"activation": activation, "layout": layout, "starts": starts}
        assert_all_close(run(inputs, **options, backend=backend), run(inputs, **options, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("activation", "mixes", "layout"), VARIANTS)
def test_low_precision_is_no_worse_than_plain_pytorch(backend, activation, mixes, layout, dtype):
    if refused(backend, activation, mixes, dtype):
        return
    options = {"activation": activation, "layout": layout}
    inputs = op_inputs(
        queries=min(SEVERAL, 50), qk_dim=8, vo_dim=8, activation=activation, mixes=mixes, dtype=dtype
    )
    exact = run(inputs.to(torch.float64), **options, backend="reference")
    plain = run(inputs, lambda *a: trace(Attention(*a, None, activation, layout, 1e-12)).output)
    for i, (a, p, e) in enumerate(zip(run(inputs, **options, backend=backend), plain, exact, strict=True)):
        assert a.dtype == dtype
        assert_no_worse(a, p, e, what=f"tensor {i}")


@pytest.mark.parametrize(("activation", "mixes", "layout"), VARIANTS)
def test_gradients_are_derivatives(backend, activation, mixes, layout):
    if refused(backend, activation, mixes):
        return
    inputs = op_inputs(
        batch=1, queries=3, keys=4, heads=1, qk_dim=2, vo_dim=2, rank=2, activation=activation, mixes=mixes
    ).requires_grad()

    def function(*tensors):
        q, k, v, *rest = tensors
        pairs = [Mix(*rest[i : i + 4]) for i in range(0, len(rest), 4)]
        mix1 = pairs.pop(0) if "1" in mixes else None
        mix2 = pairs.pop(0) if "2" in mixes else None
        return hyper_attention(q, k, v, mix1, mix2, activation=activation, layout=layout, backend=backend)

    assert torch.autograd.gradcheck(function, inputs.tensors())


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_and_any_starts(backend, data):
    activation, layout = data.draw(st.sampled_from(ACTIVATIONS)), data.draw(st.sampled_from(LAYOUTS))
    mixes = data.draw(st.sampled_from(MIXES))
    request = Request("attention", "cpu", torch.float64, activation, bool(mixes))
    assume(BACKENDS[backend].refusal(request) is None)
    batch, heads, rank = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 5)),
    )
    keys = data.draw(st.integers(1, 40))
    queries = data.draw(st.integers(1, keys))
    rows = []
    for _ in range(batch):
        row = sorted(data.draw(st.lists(st.integers(0, keys), min_size=queries, max_size=queries)))
        rows.append([min(start, keys - queries + i + 1) for i, start in enumerate(row)])
    starts = data.draw(st.sampled_from([None, torch.tensor(rows)]))
    span = (
        keys if starts is None else max(keys - queries + i + 1 - s for row in rows for i, s in enumerate(row))
    )
    slots = data.draw(st.integers(max(1, span), keys + 3))
    # a single channel: normalised scores do not depend on the length of q, whose gradient is zero, all
    # cancellation
    sizes = {
        "qk_dim": data.draw(st.integers(2, 7)),
        "vo_dim": data.draw(st.integers(1, 7)),
        "slots": slots,
        "rank": rank,
    }
    inputs = op_inputs(
        batch=batch, queries=queries, keys=keys, heads=heads, activation=activation, mixes=mixes, **sizes
    )
    options = {"activation": activation, "layout": layout, "starts": starts}
    assert_all_close(run(inputs, **options, backend=backend), run(inputs, **options, backend="reference"))


@pytest.mark.parametrize("length", range(1, 18))
def test_short_lengths_are_finite_even_for_zero_input(backend, length):
    inputs, options = example(backend, queries=length)
    zero = inputs._replace(q=torch.zeros_like(inputs.q), k=torch.zeros_like(inputs.k))
    for result in run(zero, **options) + run(inputs, **options):
        assert torch.isfinite(result).all()


def test_rows_that_see_nothing_are_zero_and_receive_no_gradient(backend):
    for activation, mixes in itertools.product(ACTIVATIONS, ("", "12")):
        if refused(backend, activation, mixes):
            continue
        inputs = op_inputs(queries=8, activation=activation, mixes=mixes)
        out, grad_q, grad_k, grad_v, *_ = run(
            inputs, activation=activation, starts=torch.tensor([3, 8]), backend=backend
        )
        for result in (out, grad_q, grad_k, grad_v):
            assert (result[0, :3] == 0).all()
            assert (result[1] == 0).all()
            assert (result[0, 3:] != 0).any()


def test_a_window_is_a_truncated_history(backend):
    """The paper's truncation invariance: in lag order older keys beyond the start do not exist."""
    for layout in LAYOUTS:
        inputs, options = example(backend, queries=1, keys=20)
        starts = torch.full((2,), 13)
        short = inputs._replace(k=inputs.k[:, 13:], v=inputs.v[:, 13:])
        windowed = hyper_attention(*inputs, layout=layout, starts=starts, **options)
        assert_close(windowed, hyper_attention(*short, layout=layout, **options), tolerance=TIGHT)


def test_queries_are_the_last_positions(backend):
    inputs, options = example(backend, queries=21)
    full = hyper_attention(*inputs, **options)
    for first in (1, 7, 20):
        mix1, mix2 = (mix and mix._replace(gate=mix.gate[:, first:]) for mix in inputs[3:])
        rest = hyper_attention(inputs.q[:, first:], inputs.k, inputs.v, mix1, mix2, **options)
        assert_close(rest, full[:, first:], tolerance=TIGHT)


def test_batch_composition_does_not_matter(backend):
    inputs, options = example(backend, batch=3, queries=40)
    full = hyper_attention(*inputs, **options)
    for b in range(3):
        q, k, v = (x[b : b + 1] for x in inputs[:3])
        mix1, mix2 = (mix and mix._replace(gate=mix.gate[b : b + 1]) for mix in inputs[3:])
        assert_close(hyper_attention(q, k, v, mix1, mix2, **options), full[b : b + 1], tolerance=TIGHT)


def test_non_contiguous_inputs(backend):
    inputs, options = example(backend, queries=19)
    strided = inputs._replace(
        q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.stack([inputs.k, inputs.k], dim=-1)[..., 0],
        v=inputs.v.flip(1).flip(1),
        mix1=inputs.mix1 and Mix(*(x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs.mix1)),
    )
    assert not strided.q.is_contiguous()
    starts = torch.stack([torch.arange(19) // 4 * 4, torch.arange(19) // 7 * 7])
    turned = starts.t().contiguous().t()
    assert not turned.is_contiguous()
    actual = hyper_attention(*strided, **options, starts=turned)
    assert_close(actual, hyper_attention(*inputs, **options, starts=starts), tolerance=TIGHT)


def test_same_input_same_bits(backend):
    inputs, options = example(backend, queries=MANY, qk_dim=16, vo_dim=16, rank=8, dtype=torch.float32)
    for first, second in zip(run(inputs, **options), run(inputs, **options), strict=True):
        assert torch.equal(first, second)


def test_thread_count_does_not_matter(backend):
    inputs, options = example(backend, queries=MANY)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(inputs, **options)
        torch.set_num_threads(2)
        two = run(inputs, **options)
    finally:
        torch.set_num_threads(threads)
    assert_all_close(two, one)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_fill_no_block_and_no_vector(backend, layout):
    sizes = {"heads": 1, "qk_dim": 19, "vo_dim": 37, "rank": 21}
    for queries, keys, slots in ((100, 170, 171), (5, 170, 400), (40, 1601, 1601)):
        inputs, options = example(backend, batch=1, queries=queries, keys=keys, slots=slots, **sizes)
        for starts in (None, torch.arange(keys - queries, keys)[None] // 33 * 33):
            options |= {"layout": layout, "starts": starts}
            assert_all_close(run(inputs, **options), run(inputs, **options | {"backend": "reference"}))


@pytest.mark.parametrize("branch", [0, 1])
def test_nan_is_not_hidden(backend, branch):
    for queries in (1, 6):
        inputs, options = example(backend, queries=queries, keys=6, heads=1, dtype=torch.float32)
        inputs.q[:, :, branch % inputs.q.shape[2]] = torch.nan
        assert hyper_attention(*inputs, **options).isnan().all()


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize(
    ("activation", "score", "value"),
    [("relu", 1e9, 1e21), ("glu", 1e7, 1e12), ("relu", 1e-9, 1e-32), ("relu", 1e8, 1e-20)],
)
def test_the_range_is_that_of_the_normalised_row(backend, activation, score, value, queries):
    """1/rho may be applied after the readout only if the readout itself stays within the range of float32."""
    for mixes in ("", "12"):
        if refused(backend, activation, mixes):
            continue
        inputs = op_inputs(
            queries=queries, keys=30, activation=activation, mixes=mixes, dtype=torch.float32, seed=3
        )
        inputs = inputs._replace(q=inputs.q * score, k=inputs.k * score, v=inputs.v * value)
        options = {"activation": activation, "eps": 1e-30}
        exact = run(inputs.to(torch.float64), **options, backend="reference")
        plain = run(inputs, **options, backend="reference")
        for i, (a, p, e) in enumerate(
            zip(run(inputs, **options, backend=backend), plain, exact, strict=True)
        ):
            if torch.isfinite(p).all():
                assert_no_worse(a, p, e, what=f"{activation}, mixes {mixes!r}, tensor {i}")
            else:
                assert i > 0, "the reference's output must be finite"


def test_strong_scores_stay_finite(backend):
    for activation, mixes in itertools.product(ACTIVATIONS, ("", "12")):
        if refused(backend, activation, mixes):
            continue
        inputs = op_inputs(queries=20, activation=activation, mixes=mixes, dtype=torch.float32)
        strong = inputs._replace(q=inputs.q * 1e4, k=inputs.k * 1e4)
        for result in run(strong, activation=activation, backend=backend):
            assert torch.isfinite(result).all()
