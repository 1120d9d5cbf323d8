"""The backend "triton" in Triton's interpreter: what the contract (test_contract.py) does not say.

tests/ops/test_triton.py runs this file in a process of its own; conftest.py sets chunks, guards and hints:

    TRITON_INTERPRET=1 python -m pytest tests/ops/triton_interpreted.py -m ""
"""

import itertools

import pytest
import torch
import triton.runtime.interpreter as interpreter

from hypermlp.ops import contract, hyper_attention
from hypermlp.ops.arguments import Attention
from hypermlp.ops.inputs import PATTERNS
from hypermlp.ops.layout import row_starts
from hypermlp.ops.reference import attention
from hypermlp.ops.triton import call, launch, selfcheck
from hypermlp.ops.triton.decode import decode
from hypermlp.ops.triton.launch import use_settings
from hypermlp.testing import assert_close, op_inputs

FLOAT32 = 2e-6  # worst relative error against the float64 reference
SMALL = {"batch": 1, "heads": 1}
ALL_SEQUENCES = 1 << 30  # bytes of scratch


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CUTS = {  # sizes of a case, and settings that cut it into chunks, splits and residue classes
    "eight classes": ({"queries": 9, "keys": 21}, {"residues": 8, "rows": 16}),
    "many splits": ({"queries": 5, "keys": 40, "batch": 2}, {"rows": 64, "programs": 64}),
    "no splits, one chunk": (
        {"queries": 7, "keys": 14, "batch": 3, "heads": 2},
        {"rows": 4, "programs": 1, "scratch_bytes": ALL_SEQUENCES},
    ),
    "two sequences in a chunk": (
        {"queries": 11, "keys": 14, "batch": 3, "heads": 2},
        {"rows": 6, "scratch_bytes": 60_000},
    ),
    "many chunks": ({"queries": 40, "keys": 40, "heads": 2}, {"residues": 8, "rows": 16}),
    "one sum": ({"queries": 6, "keys": 17, "rank": 1}, {}),
    "rank of a tile": ({"queries": 6, "keys": 17, "rank": 16}, {}),
    "padded rank": ({"queries": 6, "keys": 17, "rank": 17}, {}),
    "several tiles of keys": ({"queries": 1, "keys": 200, "rank": 32}, {"decode_programs": 64}),
}
FAST = [
    ("eight classes", "glu", "lag", "packed"),
    ("two sequences in a chunk", "relu", "lag", "window"),
    ("padded rank", "glu", "forward", "all"),
    ("several tiles of keys", "glu", "lag", "padding"),
]
EVERY = itertools.product(CUTS, ("relu", "glu"), ("lag", "forward"), PATTERNS)


@pytest.mark.parametrize(
    ("cut", "activation", "layout", "pattern"), [*FAST, *(slow(*one) for one in EVERY if one not in FAST)]
)
def test_any_way_of_cutting(cut, activation, layout, pattern, hinted):
    sizes, settings = CUTS[cut]
    case = contract.attention(activation, "12", layout, pattern, **SMALL | sizes)
    with use_settings(**settings):
        contract.check(case, "triton", torch.float32, tolerance=FLOAT32)
    assert (hinted[0] > 0) == (layout == "lag" or pattern == "all")


@pytest.mark.parametrize("case", contract.cases(contract.VARIANTS[:3], keys=9, **SMALL), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)])
def test_every_kernel(case, dtype):
    if case.refusal("triton", dtype) is None:
        contract.check(
            case, "triton", dtype, tolerance=FLOAT32 if dtype == torch.float32 else None, repeat=True
        )


@pytest.mark.slow
def test_program_order_does_not_matter(monkeypatch):
    """Programs of a launch run in a random order: none may depend on another."""
    cases = [
        contract.attention(pattern="window", queries=6, keys=40, **SMALL),
        contract.attention(queries=1, keys=70, **SMALL),
        contract.convolution(2, 67, 3, 130),
    ]
    expected = [case.results("triton", torch.float32) for case in cases]
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
    for case, results in zip(cases, expected, strict=True):
        for name, actual in case.results("triton", torch.float32).items():
            assert torch.equal(actual, results[name]), name
    assert shuffled[0] > 50


@pytest.mark.parametrize("layout", ["lag", "forward"])
def test_a_wrong_hint_is_found(monkeypatch, hinted, layout):
    """The check of the hints fails if the scratch is misaligned."""
    right = launch.Geometry.__init__

    def misaligned(self, *arguments):
        right(self, *arguments)
        self.ld = lambda keys: self.pad + keys + self._tail | 1

    case = contract.attention(layout=layout, queries=6, keys=6, **SMALL)
    case.results("triton", torch.float32)
    assert hinted[0] > 0
    monkeypatch.setattr(launch.Geometry, "__init__", misaligned)
    with pytest.raises(interpreter.InterpreterError, match="less aligned than its hint"):
        case.results("triton", torch.float32)


@pytest.mark.slow
def test_buffers_begin_aligned(monkeypatch):
    """Kernels hint at cells of a buffer; the buffer itself and its rows begin at multiples of 16 cells."""
    case = contract.attention(queries=20, keys=20, batch=2)
    with use_settings(residues=8, rows=16), launch.recording() as record:
        case.results("triton", torch.bfloat16)
    hot = [one.arguments for one in record.launches if one.kernel is not None and "ld" in one.arguments]
    assert len(hot) > 10
    for arguments in hot:
        assert arguments["ld"] % 16 == 0
        for name in {"scores", "weights", "values", "before", "after", "grad_scores"} & set(arguments):
            assert arguments[name].data_ptr() % 16 == 0
            assert arguments[name].is_contiguous()


def test_a_cache_of_fixed_size():
    """``positions`` says how many of the cache's keys exist; the others are never read."""
    for layout, starts in (("lag", None), ("forward", torch.tensor([[2], [3]]))):
        inputs = op_inputs(queries=1, keys=150, dtype=torch.float32)
        ends = torch.tensor([70, 9])
        k, v = inputs.k.clone(), inputs.v.clone()
        for b in range(2):
            k[b, ends[b] :] = v[b, ends[b] :] = torch.nan
        arguments = Attention(inputs.q, k, v, *inputs[3:], starts, "glu", layout, 1e-12)
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
    inputs = op_inputs(queries=1, keys=70, dtype=torch.float32)
    room_k, room_v = (torch.cat([x, x * torch.nan], 1) for x in (inputs.k, inputs.v))
    with launch.recording() as record, torch.no_grad():
        cached = inputs._replace(k=room_k[:, :70], v=room_v[:, :70])
        out = hyper_attention(*cached, backend="triton")
    assert_close(out, hyper_attention(*inputs, activation="glu", backend="reference"), tolerance=FLOAT32)
    given = {
        name: one.arguments[name] for one in record.launches for name in ("k", "v") if name in one.arguments
    }
    assert given["k"].data_ptr() == room_k.data_ptr()
    assert given["v"].data_ptr() == room_v.data_ptr()
    names = [one.name for one in record.launches]
    assert names == ["decode_scores", "decode_activate", "decode_readout", "collect"]


def test_opcheck():
    inputs = op_inputs(queries=3, batch=1, heads=1).requires_grad()
    starts = row_starts(torch.tensor([1]), 3, 3, -1)
    with use_settings(programs=1):
        flat = Attention(*inputs, starts, "glu", "lag", 1e-12).flatten()
        checks = torch.library.opcheck(torch.ops.hypermlp.triton.default, flat)
    assert set(checks.values()) == {"SUCCESS"}


def test_compiles_whole_and_gives_the_same(compiler):
    inputs = op_inputs(queries=5, batch=1, heads=1).requires_grad()
    function = compiler(lambda inputs: hyper_attention(*inputs, backend="triton"), fullgraph=True)
    out = function(inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs.tensors())
    expected = hyper_attention(*inputs, backend="reference")
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs.tensors())
    for a, e in zip([out, *grads], [expected, *expected_grads], strict=True):
        assert_close(a, e, tolerance=1e-10)


def test_autocast_casts_data_and_keeps_parameters():
    inputs = op_inputs(queries=8, batch=1, heads=1, dtype=torch.float32).requires_grad()
    expected = hyper_attention(*inputs.to(torch.float64), backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        out = hyper_attention(*inputs, backend="triton")
        grads = torch.autograd.grad(out.float().sum(), inputs.tensors())
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, tolerance=8 * torch.finfo(torch.bfloat16).eps)
    assert all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.slow
def test_the_self_check_passes():
    verdict = selfcheck.self_check("cpu", {"keys": 5, **SMALL}, seconds=600.0, store=False)
    assert verdict[:2] == (True, "11 of 11 cases")


def test_the_self_check_notices_a_mistake(monkeypatch):
    """Partial sums that are never added up."""
    monkeypatch.setattr(call.Call, "collect", lambda self, chunk, buffer, total: total.zero_())
    with use_settings(programs=64):
        verdict = selfcheck.self_check("cpu", {"keys": 5, **SMALL}, seconds=600.0, store=False)
    assert not verdict.passed
    assert verdict.detail.startswith(
        "glu, mixes 12, layout lag, all, training, bfloat16, output: relative error"
    )


@pytest.mark.slow
def test_second_derivatives_are_refused():
    inputs = op_inputs(queries=3, batch=1, heads=1).requires_grad()
    (grad,) = torch.autograd.grad(
        hyper_attention(*inputs, backend="triton").sum(), inputs.q, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()
