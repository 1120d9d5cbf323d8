"""What the blocked backend does on a GPU, as far as a CPU and the meta device show it: products of halves for
tensor cores, and no waiting for the device.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypermlp.ops import blocked, hyper_attention
from hypermlp.ops.arguments import Attention
from hypermlp.testing import assert_no_worse, op_inputs

STARTS = torch.tensor([0, 7])


@pytest.fixture
def tensor_cores(monkeypatch):
    """Pretend that this machine's GEMM multiplies halves: their products are exact in float32."""
    calls = []

    def half_product(left, right):
        assert left.dtype == right.dtype != torch.float32
        calls.append(left.dtype)
        return torch.bmm(left.float(), right.float())

    monkeypatch.setattr(blocked, "TENSOR_CORES", {"cpu"})
    monkeypatch.setattr(blocked, "half_product", half_product)
    return calls


def with_gradients(inputs, backend, **settings):
    inputs = inputs.to(inputs.q.dtype).requires_grad()
    out = hyper_attention(*inputs, backend=backend, **settings)
    return [out, *torch.autograd.grad(out.square().sum(), inputs.tensors())]


@pytest.mark.parametrize("activation", ["relu", "glu", "softmax"])
@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, 7), (torch.float16, 2)])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "padded"])
def test_products_of_halves(activation, dtype, products, starts, tensor_cores):
    inputs = op_inputs(queries=40, activation=activation).to(dtype)
    settings = {"activation": activation, "starts": starts}
    actual = with_gradients(inputs, "blocked", **settings)
    # bfloat16: 2 of the forward, 5 of the backward. float16: scores alone, of forward and backward.
    assert len(tensor_cores) == products * len(range(0, 40, 32))
    plain = with_gradients(inputs, "reference", **settings)
    exact = with_gradients(inputs.to(torch.float64), "reference", **settings)
    for i, each in enumerate(zip(actual, plain, exact, strict=True)):
        assert_no_worse(*each, what=f"tensor {i}")


def test_float16_does_not_overflow(tensor_cores):
    """The activation before its division by rho exceeds float16; the result does not."""
    inputs = op_inputs(queries=40, activation="relu", mixes="", dtype=torch.float16)
    inputs = inputs._replace(q=inputs.q * 1000, k=inputs.k * 100)
    out = hyper_attention(*inputs, activation="relu", backend="blocked")
    plain = hyper_attention(*inputs, activation="relu", backend="reference")
    exact = hyper_attention(*inputs.to(torch.float64), activation="relu", backend="reference")
    assert_no_worse(out, plain, exact)


class Record(TorchDispatchMode):
    """Record the operators, and raise if one reads a value or has a result of unknown size."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(bad in name for bad in ("_local_scalar_dense", "item", "nonzero", "is_nonzero")), name
        self.calls.append((name, [x.dtype for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["lag", "forward"])
@pytest.mark.parametrize("activation", ["relu", "glu", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "starts", [None, STARTS, torch.arange(40).expand(2, -1) // 2], ids=["no", "pad", "window"]
)
def test_nothing_waits_for_the_device(layout, activation, dtype, starts, monkeypatch):
    """Meta tensors have no values, and every operator is seen."""
    monkeypatch.setattr(blocked, "TENSOR_CORES", {"meta"})
    inputs = op_inputs(queries=40, activation=activation, dtype=dtype)
    on_device = [
        None if x is None else x.to("meta") for x in Attention(*inputs, None, "", "", 0.0).flatten()[:-4]
    ]
    rows = (
        None
        if starts is None
        else (starts if starts.dim() == 2 else starts[:, None].expand(2, 40)).to("meta")
    )
    arguments = Attention.unflatten((*on_device, rows, activation, layout, 1e-12))
    with Record() as record:
        out, inverse_norm = blocked.forward(arguments)
        grads = blocked.backward(out, inverse_norm, arguments)
    assert [g.shape for g in grads] == [x.shape for x in inputs.tensors()]
    halves = [dtypes for name, dtypes in record.calls if name == "aten.bmm.dtype"]
    assert halves == [[torch.bfloat16] * 2] * (14 if dtype == torch.bfloat16 else 0)


def test_reading_a_value_is_noticed():
    with Record(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()
