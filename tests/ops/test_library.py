"""The operator as PyTorch sees it: opcheck, torch.compile, autocast, double backward."""

import pytest
import torch

from hypermlp.ops import hyper_attention
from hypermlp.ops.backends import BACKENDS
from hypermlp.testing import assert_close, op_inputs

KERNELS = [name for name in BACKENDS if name != "reference"]  # the reference is plain PyTorch


@pytest.fixture(params=KERNELS)
def kernel(request):
    reason = BACKENDS[request.param].unavailable()
    if reason is not None:
        pytest.skip(f"backend {request.param} is not available: {reason}")
    return request.param


@pytest.mark.parametrize("activation", ["relu", "glu", "softmax"])
@pytest.mark.parametrize("mixes", ["1", "2", "12"])
def test_opcheck(kernel, activation, mixes):
    if BACKENDS[kernel].unsupported("cpu", activation):
        return  # refused: tests/ops/test_contract.py
    inputs = op_inputs(queries=6, activation=activation, mixes=mixes).requires_grad()
    none = (None,) * 4
    starts = torch.tensor([[0, 0, 0, 2, 2, 2], [0, 1, 2, 3, 4, 5]]) if mixes == "12" else None
    op = getattr(torch.ops.hypermlp, kernel).default
    arguments = (
        *inputs[:3],
        *(inputs.mix1 or none),
        *(inputs.mix2 or none),
        starts,
        activation,
        "lag",
        1e-12,
    )
    checks = torch.library.opcheck(op, arguments)
    assert set(checks.values()) == {"SUCCESS"}


def test_opcheck_of_starts():
    checks = torch.library.opcheck(torch.ops.hypermlp.row_starts.default, (torch.tensor([0, 2]), 4, 5, -1))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("activation", ["glu", "softmax"])
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 3])])
def test_compiles_whole_and_gives_the_same(kernel, activation, starts, compiler):
    mixes = "12" if activation == "glu" else ""
    inputs = op_inputs(queries=12, activation=activation, mixes=mixes).requires_grad()

    def function(inputs, starts):
        return hyper_attention(*inputs, activation=activation, starts=starts, backend=kernel)

    compiled = compiler(function, fullgraph=True)
    for f in (function, compiled):
        out = f(inputs, starts)
        grads = torch.autograd.grad(out.square().sum(), inputs.tensors())
        if f is function:
            expected = [out, *grads]
    for a, e in zip([out, *grads], expected, strict=True):
        assert_close(a, e, tolerance=1e-10)


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
    inputs = op_inputs(queries=30, dtype=torch.float32).requires_grad()
    exact = hyper_attention(*inputs.to(torch.float64), backend="reference")
    with torch.autocast("cpu", dtype):
        out = hyper_attention(*inputs, backend=backend)
    assert out.dtype == dtype
    assert_close(out, exact, tolerance=8 * torch.finfo(dtype).eps)
    grads = torch.autograd.grad(out.float().sum(), inputs.tensors())
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_half_precision_data_with_float32_parameters(backend):
    inputs = op_inputs(queries=10, dtype=torch.float32)
    half = inputs.to(torch.bfloat16)._replace(mix1=inputs.mix1, mix2=inputs.mix2)
    out = hyper_attention(*half, backend=backend)
    assert out.dtype == torch.bfloat16
    assert_close(out, hyper_attention(*inputs, backend="reference"), tolerance=0.05)


def test_plain_softmax_uses_the_fused_kernel():
    inputs = op_inputs(queries=8, activation="softmax", mixes="")
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert torch.equal(hyper_attention(*inputs, activation="softmax"), expected)


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
