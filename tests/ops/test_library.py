"""The operator as PyTorch sees it: opcheck, torch.compile, autocast, double backward."""

import dataclasses

import pytest
import torch

from hypermlp.ops import hyper_attention
from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.dispatch import BACKENDS, use_backend
from hypermlp.testing import assert_close, op_inputs

KERNELS = ["native", "blocked"]  # the reference and sdpa are made of PyTorch's own operators


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = BACKENDS[request.param].unavailable()
    if reason is not None:
        pytest.skip(f"backend {request.param} is not available: {reason}")
    return request.param


@pytest.mark.parametrize("activation", ["relu", "glu", "softmax"])
@pytest.mark.parametrize("mixes", ["1", "2", "12"])
def test_opcheck(kernel, activation, mixes):
    if BACKENDS[kernel].refusal(Request("attention", "cpu", torch.float64, activation, mixed=True)):
        return  # tests/ops/test_contract.py checks the refusal
    inputs = op_inputs(queries=6, activation=activation, mixes=mixes).requires_grad()
    starts = torch.tensor([[0, 0, 0, 2, 2, 2], [0, 1, 2, 3, 4, 5]]) if mixes == "12" else None
    op = getattr(torch.ops.hypermlp, kernel).default
    arguments = Attention(*inputs, starts, activation, "lag", 1e-12)
    checks = torch.library.opcheck(op, arguments.flatten())
    assert set(checks.values()) == {"SUCCESS"}


def test_opcheck_of_starts():
    checks = torch.library.opcheck(torch.ops.hypermlp.row_starts.default, (torch.tensor([0, 2]), 4, 5, -1))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.thorough
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 3])])
def test_compiles_whole_and_gives_the_same(backend, starts, compiler):
    activation, mixes = ("softmax", "") if backend == "sdpa" else ("glu", "12")
    inputs = op_inputs(queries=12, activation=activation, mixes=mixes).requires_grad()

    def function(inputs, starts):
        return hyper_attention(*inputs, activation=activation, starts=starts, backend=backend)

    compiled = compiler(function, fullgraph=True)
    for f in (function, compiled):
        out = f(inputs, starts)
        grads = torch.autograd.grad(out.square().sum(), inputs.tensors())
        if f is function:
            expected = [out, *grads]
    for a, e in zip([out, *grads], expected, strict=True):
        assert_close(a, e, tolerance=1e-10)


@pytest.mark.thorough
def test_compiles_with_symbolic_lengths(kernel, compiler):
    compiled = compiler(
        lambda inputs, starts: hyper_attention(*inputs, starts=starts, backend=kernel),
        fullgraph=True,
        dynamic=True,
    )
    for length in (6, 9):
        inputs = op_inputs(queries=length)
        for starts in (torch.tensor([0, 3]), (torch.arange(length) // 4 * 4).expand(2, -1).contiguous()):
            expected = hyper_attention(*inputs, starts=starts, backend="reference")
            assert_close(compiled(inputs, starts), expected, tolerance=1e-10)


def test_compiled_code_still_checks_starts(kernel, compiler):
    inputs = op_inputs(queries=4)
    compiled = compiler(
        lambda starts: hyper_attention(*inputs, starts=starts, backend=kernel), fullgraph=True
    )
    compiled(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="beyond its query: got 9"):
        compiled(torch.tensor([0, 9]))


def test_second_derivatives_are_refused(kernel):
    inputs = op_inputs(queries=4).requires_grad()
    (grad,) = torch.autograd.grad(hyper_attention(*inputs, backend=kernel).sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()


def test_the_reference_has_second_derivatives():
    inputs = op_inputs(queries=3, batch=1, heads=1, rank=1, qk_dim=2, vo_dim=2).requires_grad()

    def function(q):
        return hyper_attention(q, *inputs[1:], backend="reference")

    assert torch.autograd.gradgradcheck(function, inputs.q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_data_and_keeps_parameters(backend, dtype):
    activation, mixes = ("softmax", "") if backend == "sdpa" else ("glu", "12")
    inputs = op_inputs(queries=30, activation=activation, mixes=mixes, dtype=torch.float32).requires_grad()
    exact = hyper_attention(*inputs.to(torch.float64), activation=activation, backend="reference")
    with torch.autocast("cpu", dtype):
        out = hyper_attention(*inputs, activation=activation, backend=backend)
    assert out.dtype == dtype
    assert_close(out, exact, tolerance=8 * torch.finfo(dtype).eps)
    grads = torch.autograd.grad(out.float().sum(), inputs.tensors())
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_half_precision_data_with_float32_parameters(backend):
    if backend == "sdpa":
        return  # it has no parameters
    inputs = op_inputs(queries=10, dtype=torch.float32)
    half = inputs.to(torch.bfloat16)._replace(mix1=inputs.mix1, mix2=inputs.mix2)
    out = hyper_attention(*half, backend=backend)
    assert out.dtype == torch.bfloat16
    assert_close(out, hyper_attention(*inputs, backend="reference"), tolerance=0.05)


def test_auto_takes_the_fused_kernel_for_softmax_without_building_ours(monkeypatch):
    def build():
        raise AssertionError("asked whether the native kernels are there")

    monkeypatch.setitem(BACKENDS, "native", dataclasses.replace(BACKENDS["native"], unavailable=build))
    inputs = op_inputs(queries=8, activation="softmax", mixes="")
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert torch.equal(hyper_attention(*inputs, activation="softmax"), expected)


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_an_explicit_backend_runs_or_is_refused(backend):
    """No backend runs in the place of the one that was asked for."""
    softmax, glu = op_inputs(activation="softmax", mixes=""), op_inputs(activation="glu")
    for inputs, activation in ((softmax, "softmax"), (glu, "glu")):
        request = Request("attention", "cpu", torch.float64, activation, inputs.mix1 is not None)
        if BACKENDS[backend].refusal(request) is not None:
            with pytest.raises(ValueError, match=f"backend '{backend}' is not available"):
                hyper_attention(*inputs, activation=activation, backend=backend)


def test_switching_the_backend_recompiles(monkeypatch, compiler):
    """A compiled function follows ``use_backend``: its name is a value that torch.compile guards on."""
    ran = []

    def recording(name):
        right = BACKENDS[name]

        def attention(arguments):
            ran.append(name)
            return right.attention(arguments)

        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(right, attention=attention))

    for name in ("blocked", "reference"):
        recording(name)
    inputs = op_inputs(queries=6)
    compiled = compiler(lambda inputs: hyper_attention(*inputs), backend="eager", fullgraph=True)
    for name in ("blocked", "reference", "blocked"):
        with use_backend(name):
            out = compiled(inputs)
        assert_close(out, hyper_attention(*inputs, backend="reference"), tolerance=1e-10)
    assert ran[:2] == ["blocked", "reference"]


def test_forward_mode_derivatives_are_refused(kernel):
    inputs = op_inputs(queries=4)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda v: hyper_attention(*inputs[:2], v, *inputs[3:], backend=kernel), (inputs.v,), (inputs.v,)
        )
    _, tangent = torch.func.jvp(
        lambda v: hyper_attention(*inputs[:2], v, *inputs[3:], backend="reference"), (inputs.v,), (inputs.v,)
    )
    assert_close(tangent, hyper_attention(*inputs), tolerance=1e-10)  # linear in v


def test_shapes_on_the_meta_device():
    inputs = op_inputs(queries=4, device="meta")
    assert hyper_attention(*inputs, starts=torch.tensor([0, 1], device="meta")).shape == (2, 4, 2, 5)


@pytest.mark.parametrize("heads", [1, 2])
def test_nothing_that_is_passed_in_is_changed(kernel, heads):
    inputs = op_inputs(batch=1, heads=heads, queries=7).requires_grad()
    before = [x.clone() for x in inputs.tensors()]
    out = hyper_attention(*inputs, backend=kernel)
    cotangent = torch.randn_like(out)
    kept = cotangent.clone()
    out.backward(cotangent)
    assert torch.equal(cotangent, kept)
    for x, old in zip(inputs.tensors(), before, strict=True):
        assert torch.equal(x, old)
