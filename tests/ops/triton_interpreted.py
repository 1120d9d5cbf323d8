"""The contract of the operator for the backend "triton", in Triton's interpreter.

tests/ops/test_triton.py runs this file in a process of its own, because TRITON_INTERPRET=1 has to be set
before anything imports Triton:

    TRITON_INTERPRET=1 python -m pytest tests/ops/triton_interpreted.py -m ""
"""

import sys
from pathlib import Path

import pytest
import torch
import triton.runtime.interpreter as interpreter
from triton import language as tl

from hypermlp.ops import hyper_attention
from hypermlp.ops.arguments import Attention
from hypermlp.ops.layout import row_starts
from hypermlp.ops.reference import attention, trace
from hypermlp.ops.triton import interpreting, launch, problem, selfcheck
from hypermlp.ops.triton.decode import decode
from hypermlp.testing import assert_close, assert_no_worse, op_inputs, relative_error

sys.path.insert(0, str(Path(__file__).parent))
from triton_cases import VARIANTS, Case, all_cases, fast_cases, run

FLOAT32 = 2e-6  # worst relative error against the float64 reference
FLOOR = 1e-3  # the least size that an error is relative to: a gradient may be zero but for rounding
SLOW_FORWARD = pytest.param("forward", marks=pytest.mark.slow)
GUARD = 64  # numbers on both sides of every scratch buffer
CANARY = 12345.0
FAST = fast_cases()[::8]
CASES = [
    *(pytest.param(case, id=str(case)) for case in FAST),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in all_cases() if case not in FAST),
]


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Fill scratch with NaN and surround it with canaries, which must live."""
    assert interpreting()
    buffers = []

    def empty(name, like, size, dtype):
        room = torch.full((GUARD + size + GUARD,), CANARY, dtype=dtype, device=like.device)
        room[GUARD : GUARD + size] = torch.nan
        buffers.append((name, room))
        return room[GUARD : GUARD + size]

    monkeypatch.setattr(launch, "empty", empty)
    yield
    for name, room in buffers:
        for edge in (room[:GUARD], room[-GUARD:]):
            assert (edge == torch.tensor(CANARY, dtype=room.dtype)).all(), f"{name}: written beyond its end"


@pytest.fixture
def hinted(monkeypatch):
    """Check every alignment hint; the interpreter itself ignores them. Counts them."""
    count = [0]
    patch = interpreter._patch_lang

    def check(input, values):
        assert isinstance(input, tl.tensor)
        assert (input.handle.data % int(values[0]) == 0).all(), "an address is less aligned than its hint"
        count[0] += 1
        return input

    def patched(function):
        scope = patch(function)
        scope.set_attr(tl, "multiple_of", check)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patched)
    return count


def exact(case, inputs):
    return run(case, inputs.to(torch.float64), backend="reference")


@pytest.mark.parametrize("case", CASES)
def test_contract(case, hinted, record_property):
    inputs = case.inputs(torch.float32)
    worst = 0.0
    for name, a, e in zip(case.names(), run(case, inputs), exact(case, inputs), strict=True):
        assert_close(a, e, tolerance=FLOAT32, floor=FLOOR, what=name)
        worst = max(worst, relative_error(a, e, floor=FLOOR))
    record_property("worst", worst)
    aligned = case.queries > 1 and (case.layout == "lag" or case.pattern == "all")
    assert (hinted[0] > 0) == aligned or case.queries == 1


def test_number_of_cases():
    assert len({*all_cases(), *FAST}) >= 400


@pytest.mark.parametrize("layout", ["lag", SLOW_FORWARD])
def test_float64_is_exact(layout):
    for case in (Case(layout=layout, pattern="packed"), Case("relu", layout=layout, queries=1, keys=70)):
        inputs = case.inputs(torch.float64)
        for name, a, e in zip(case.names(), run(case, inputs), exact(case, inputs), strict=True):
            assert_close(a, e, tolerance=1e-10, floor=FLOOR, what=name)


LOW = [
    pytest.param(
        dtype,
        *variant,
        marks=() if (dtype, *variant) == (torch.bfloat16, "glu", "12", "lag") else pytest.mark.slow,
    )
    for dtype in (torch.bfloat16, torch.float16)
    for variant in VARIANTS
]


@pytest.mark.parametrize(("dtype", "activation", "mixes", "layout"), LOW)
def test_low_precision_is_no_worse_than_plain_pytorch(dtype, activation, mixes, layout):
    case = Case(activation, mixes, layout, queries=20, keys=20, rows=32)
    sizes = {"batch": 1, "heads": 1, "queries": 20, "qk_dim": 8, "vo_dim": 8}
    inputs = op_inputs(**sizes, activation=activation, mixes=mixes, dtype=dtype)
    plain = inputs.to(dtype).requires_grad()
    out = trace(Attention(*plain, None, activation, layout, 1e-12)).output
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = [out, *torch.autograd.grad(out, plain.tensors(), cotangent.to(dtype))]
    for name, a, p, e in zip(case.names(), run(case, inputs), expected, exact(case, inputs), strict=True):
        assert a.dtype == dtype
        assert_no_worse(a, p, e, what=name)


@pytest.mark.parametrize("activation", [pytest.param("relu", marks=pytest.mark.slow), "glu"])
def test_float16_does_not_overflow(activation):
    """Scores far beyond 65504, strong scales, large gradients, a row that sees nothing: all results fit."""
    case = Case(activation, pattern="padding", queries=10, keys=10)
    inputs = case.inputs(torch.float16)
    strong = inputs._replace(q=inputs.q * 2000, k=inputs.k * 200, v=inputs.v * 2**-9)
    scale = 2.0**-3 if activation == "glu" else 2.0**9
    expected = run(case, strong.to(torch.float64), backend="reference", cotangent_scale=scale)
    assert max(x.abs().max() for x in expected) < 65504
    with torch.no_grad():
        scores = torch.einsum("bihd,bjhd->bhij", *(x.double() for x in strong[:2]))
    assert scores.abs().max() > 65504
    for name, a, e in zip(case.names(), run(case, strong, cotangent_scale=scale), expected, strict=True):
        assert_close(a, e, tolerance=0.02, floor=FLOOR, what=name)


def test_strong_mixes_do_not_overflow_in_float16():
    """Each mix enlarges the gradients much, which the stored gradient of the scores must allow for."""
    case = Case("relu", queries=10, keys=10)
    inputs = case.inputs(torch.float16)
    mixes = (mix._replace(left=100 * mix.left, right=100 * mix.right) for mix in inputs[3:5])
    strong = inputs._replace(**dict(zip(("mix1", "mix2"), mixes, strict=True)))
    expected = run(case, strong.to(torch.float64), backend="reference", cotangent_scale=2.0**-6)
    assert max(x.abs().max() for x in expected) < 65504
    for name, a, e in zip(case.names(), run(case, strong, cotangent_scale=2.0**-6), expected, strict=True):
        assert_close(a, e, tolerance=0.02, floor=FLOOR, what=name)


@pytest.mark.slow
def test_small_gradients_do_not_vanish_in_float16():
    case = Case(queries=10, keys=10)
    inputs = case.inputs(torch.float16)
    actual = run(case, inputs, cotangent_scale=2.0**-14)
    expected = run(case, inputs.to(torch.float64), backend="reference", cotangent_scale=2.0**-14)
    for name, a, e in zip(case.names(), actual, expected, strict=True):
        assert_close(a, e, tolerance=0.05, what=name)


@pytest.mark.slow
def test_large_queries_with_small_gradients_keep_their_precision_in_float16():
    case = Case("glu", "", queries=10, keys=10)
    inputs = case.inputs(torch.float16)
    inputs = inputs._replace(q=8 * inputs.q, k=8 * inputs.k)
    actual = run(case, inputs, cotangent_scale=2.0**-17)
    expected = run(case, inputs.to(torch.float64), backend="reference", cotangent_scale=2.0**-17)
    found = {name: (a, e) for name, a, e in zip(case.names(), actual, expected, strict=True)}
    assert_close(*found["k"], tolerance=0.01, what="k")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["lag", "forward"])
def test_chunks_and_splits_do_not_matter(layout):
    inputs = Case().inputs(torch.float64)
    expected = exact(Case(layout=layout), inputs)
    for rows, programs, residues in ((4, 1, 1), (64, 64, 2), (8, 16, 8)):
        case = Case(layout=layout, rows=rows, programs=programs, residues=residues)
        for name, a, e in zip(case.names(), run(case, inputs), expected, strict=True):
            assert_close(a, e, tolerance=1e-10, what=name)


@pytest.mark.slow
def test_program_order_does_not_matter(monkeypatch):
    """Programs of a launch run in a random order: none may depend on another."""
    case = Case(queries=6, keys=40, pattern="window", programs=16)
    inputs = case.inputs(torch.float32)
    one = case._replace(queries=1, keys=70, pattern="all")
    expected, expected_one = run(case, inputs), run(one, one.inputs(torch.float32))
    builder, shuffled = interpreter.interpreter_builder, [0]
    right = builder.set_grid_idx
    order = torch.Generator().manual_seed(0)

    def anywhere(x, y, z):
        nx, ny, nz = builder.grid_dim
        flat, count = (x * ny + y) * nz + z, nx * ny * nz
        if flat == 0:
            anywhere.order = torch.randperm(count, generator=order).tolist()
        place = anywhere.order[flat]
        shuffled[0] += place != flat
        right(place // (ny * nz), place // nz % ny, place % nz)

    monkeypatch.setattr(builder, "set_grid_idx", anywhere)
    for a, e in zip(run(case, inputs), expected, strict=True):
        assert torch.equal(a, e)
    for a, e in zip(run(one, one.inputs(torch.float32)), expected_one, strict=True):
        assert torch.equal(a, e)
    assert shuffled[0] > 50


@pytest.mark.parametrize("layout", ["lag", "forward"])
def test_a_wrong_hint_is_found(monkeypatch, hinted, layout):
    """The check of the hints fails if the scratch is misaligned."""
    right = launch.Geometry.__init__

    def misaligned(self, *arguments):
        right(self, *arguments)
        self.ld = lambda keys: self.pad + keys + self._tail | 1

    case = Case(layout=layout, queries=6, keys=6)
    with case.settings():
        hyper_attention(*case.inputs(torch.float32), **case.options(), backend="triton")
        assert hinted[0] > 0
        monkeypatch.setattr(launch.Geometry, "__init__", misaligned)
        with pytest.raises(interpreter.InterpreterError, match="less aligned than its hint"):
            hyper_attention(*case.inputs(torch.float32), **case.options(), backend="triton")


@pytest.mark.slow
def test_buffers_begin_aligned():
    """Kernels hint at cells of a buffer; the buffer itself and its rows begin at multiples of 16 cells."""
    case = Case(queries=20, keys=20, batch=2, residues=8, rows=16)
    with launch.recording() as record:
        run(case, case.inputs(torch.bfloat16))
    hot = [one.arguments for one in record.launches if one.kernel is not None and "ld" in one.arguments]
    assert len(hot) > 10
    for arguments in hot:
        assert arguments["ld"] % 16 == 0
        for name in {"scores", "weights", "values", "before", "after", "grad_scores"} & set(arguments):
            assert (arguments[name].data_ptr() - GUARD * arguments[name].itemsize) % 16 == 0
            assert arguments[name].is_contiguous()


def test_a_cache_of_fixed_size():
    """``positions`` says how many of the cache's keys exist; the others are never read."""
    for layout, starts in (("lag", None), ("forward", torch.tensor([[2], [3]]))):
        case = Case(layout=layout, batch=2, queries=1, keys=150)
        inputs = case.inputs(torch.float32)
        ends = torch.tensor([70, 9])
        k, v = inputs.k.clone(), inputs.v.clone()
        for b in range(2):
            k[b, ends[b] :] = v[b, ends[b] :] = torch.nan
        arguments = Attention(inputs.q, k, v, *inputs[3:], starts, "glu", layout, 1e-12)
        with case.settings():
            out, _ = decode(arguments, ends - 1)
        for b in range(2):
            one = slice(b, b + 1)
            mixes = [mix._replace(gate=mix.gate[one]) for mix in inputs[3:]]
            qkv = inputs.q[one], inputs.k[one, : ends[b]], inputs.v[one, : ends[b]]
            start = None if starts is None else starts[one]
            expected = attention(Attention(*qkv, *mixes, start, "glu", layout, 1e-12))
            assert_close(out[one], expected, tolerance=FLOAT32)


def test_a_cache_is_read_in_place(monkeypatch):
    """Decoding reads keys and values out of a larger buffer, without a copy."""
    case = Case(queries=1, keys=70, batch=2)
    inputs = case.inputs(torch.float32)
    room_k, room_v = (torch.cat([x, x * torch.nan], 1) for x in (inputs.k, inputs.v))
    with case.settings(), launch.recording() as record, torch.no_grad():
        cached = inputs._replace(k=room_k[:, :70], v=room_v[:, :70])
        out = hyper_attention(*cached, activation="glu", backend="triton")
    assert_close(out, hyper_attention(*inputs, activation="glu", backend="reference"), tolerance=FLOAT32)
    given = {
        name: one.arguments[name] for one in record.launches for name in ("k", "v") if name in one.arguments
    }
    assert given["k"].data_ptr() == room_k.data_ptr()
    assert given["v"].data_ptr() == room_v.data_ptr()
    names = [one.name for one in record.launches]
    assert names == ["decode_scores", "decode_activate", "decode_readout", "collect"]


def test_same_input_same_bits():
    for case in (Case(queries=5, keys=40, programs=8), Case(queries=1, keys=130, programs=8)):
        inputs = case.inputs(torch.float32)
        for first, second in zip(run(case, inputs), run(case, inputs), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("branch", [0, 1])
def test_nan_is_not_hidden(branch):
    for queries in (1, 4):
        inputs = op_inputs(queries=queries, keys=4, batch=1, heads=1, dtype=torch.float32)
        inputs.q[:, :, branch] = torch.nan
        with Case().settings():
            out = hyper_attention(*inputs, backend="triton")
        assert out.isnan().all()


@pytest.mark.slow
def test_large_inputs_have_finite_gradients():
    """Scores of 1e16 and values of 1e8: products of unnormalised weights and gradients would overflow."""
    inputs = op_inputs(queries=5, mixes="12", dtype=torch.float32)
    inputs = inputs._replace(q=1e8 * inputs.q, k=1e8 * inputs.k, v=1e8 * inputs.v)
    exact = inputs.to(torch.float64).requires_grad()
    expected = torch.autograd.grad(hyper_attention(*exact, backend="reference").sum(), exact.tensors())
    given = inputs.to(torch.float32).requires_grad()
    found = torch.autograd.grad(hyper_attention(*given, backend="triton").sum(), given.tensors())
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, tolerance=1e-5)


def test_zero_input_and_strong_scores_stay_finite():
    case = Case(queries=7, keys=7)
    inputs = case.inputs(torch.float32)
    zero = inputs._replace(q=torch.zeros_like(inputs.q), k=torch.zeros_like(inputs.k))
    for changed in (zero, inputs._replace(q=inputs.q * 1e4, k=inputs.k * 1e4)):
        for result in run(case, changed):
            assert torch.isfinite(result).all()


def test_opcheck():
    inputs = op_inputs(queries=3, batch=1, heads=1).requires_grad()
    starts = row_starts(torch.tensor([1]), 3, 3, -1)
    with Case(programs=1).settings():
        flat = Attention(*inputs, starts, "glu", "lag", 1e-12).flatten()
        checks = torch.library.opcheck(torch.ops.hypermlp.triton.default, flat)
    assert set(checks.values()) == {"SUCCESS"}


def test_compiles_whole_and_gives_the_same(compiler):
    inputs = op_inputs(queries=5, batch=1, heads=1).requires_grad()
    function = compiler(lambda inputs: hyper_attention(*inputs, backend="triton"), fullgraph=True)
    with Case().settings():
        out = function(inputs)
        grads = torch.autograd.grad(out.square().sum(), inputs.tensors())
    expected = hyper_attention(*inputs, backend="reference")
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs.tensors())
    for a, e in zip([out, *grads], [expected, *expected_grads], strict=True):
        assert_close(a, e, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_autocast_casts_data_and_keeps_parameters(dtype):
    inputs = op_inputs(queries=8, batch=1, heads=1, dtype=torch.float32).requires_grad()
    expected = hyper_attention(*inputs.to(torch.float64), backend="reference")
    with Case().settings(), torch.autocast("cpu", dtype):
        out = hyper_attention(*inputs, backend="triton")
        grads = torch.autograd.grad(out.float().sum(), inputs.tensors())
    assert out.dtype == dtype
    assert_close(out, expected, tolerance=8 * torch.finfo(dtype).eps)
    assert all(grad.dtype == torch.float32 for grad in grads)


SMALL = {"queries": 5, "heads": 1, "qk_dim": 4, "vo_dim": 4, "rank": 3}


@pytest.mark.slow
def test_the_self_check_passes():
    with Case().settings():
        verdict = selfcheck.self_check("cpu", SMALL, seconds=600.0, store=False)
    assert verdict[:2] == (True, "8 of 8 cases")


def test_the_self_check_notices_a_mistake(monkeypatch):
    """Partial sums that are never added up."""
    monkeypatch.setattr(problem.Problem, "collect", lambda self, chunk, buffer, total: total.zero_())
    with Case(programs=64).settings():
        verdict = selfcheck.self_check("cpu", SMALL, seconds=600.0, store=False)
    assert not verdict.passed
    assert verdict.detail.startswith("glu, layout lag, all, training, bfloat16, output: relative error")


@pytest.mark.slow
def test_second_derivatives_are_refused():
    inputs = op_inputs(queries=3, batch=1, heads=1).requires_grad()
    (grad,) = torch.autograd.grad(
        hyper_attention(*inputs, backend="triton").sum(), inputs.q, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()
