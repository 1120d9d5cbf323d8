"""Causal convolutions against PyTorch's own and against its definition."""

import pytest
import torch
import torch.nn.functional as F

from hypermlp.ops.api import causal_conv
from hypermlp.testing import assert_close

every_backend = pytest.mark.parametrize(
    "backend", ["native", "native, 1 thread", "blocked", "reference"], indirect=True
)


def torch_conv(x, weight):
    """PyTorch's convolution slides the kernel the other way round."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight.flip(1)[:, None], groups=x.shape[2]).transpose(1, 2)


@every_backend
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("kernel", [1, 4])
def test_convolution_equals_pytorchs(length, kernel, backend):
    x, w1, w2 = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True)
        for s in ((2, length, 5), (5, kernel), (5, kernel))
    )
    for actual, weight in zip(causal_conv(x, (w1, w2), length, backend=backend), (w1, w2), strict=True):
        expected = torch_conv(x, weight)
        assert_close(actual, expected, tolerance=1e-12)
        for a, e in zip(
            *(
                torch.autograd.grad(y.square().sum(), [x, weight], retain_graph=True)
                for y in (actual, expected)
            ),
            strict=True,
        ):
            assert_close(a, e, tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("past", [0, 1, 3, 5])
def test_earlier_positions_are_seen(past, backend):
    x, w1, w2 = (torch.randn(*s, dtype=torch.float64) for s in ((2, 9, 5), (5, 4), (5, 4)))
    full = causal_conv(x, (w1, w2), 9, backend=backend)
    for part, whole in zip(
        causal_conv(x[:, 4 - min(past, 4) :], (w1, w2), 5, backend=backend), full, strict=True
    ):
        if past >= 3:
            assert_close(part, whole[:, 4:], tolerance=1e-12)
        assert_close(part[:, 3 - min(past, 3) :], whole[:, 4 + 3 - min(past, 3) :], tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("reach", [None, torch.tensor([[1, 2, 3, 1, 2], [0, 0, 1, 2, 3]])])
def test_gradcheck_and_opcheck(reach, count, backend):
    x, *weights = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 7, 2), *[(2, 4)] * count)
    )
    assert torch.autograd.gradcheck(
        lambda x, *weights: causal_conv(x, weights, 5, reach, backend=backend), (x, *weights)
    )
    if backend == "reference":
        return
    name = "native_conv" if backend == "native" else "conv"
    checks = torch.library.opcheck(getattr(torch.ops.hypermlp, name).default, (x, weights, 5, reach))
    assert set(checks.values()) == {"SUCCESS"}


def test_second_derivatives_of_the_convolution_are_refused():
    x, w1, w2 = (torch.randn(*s, requires_grad=True) for s in ((1, 3, 2), (2, 4), (2, 4)))
    (grad,) = torch.autograd.grad(causal_conv(x, (w1, w2), 3)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_the_gradient_of_an_output_that_is_not_used_is_zero():
    x, w1, w2 = (torch.randn(*s, requires_grad=True) for s in ((1, 3, 2), (2, 4), (2, 4)))
    grads = torch.autograd.grad(causal_conv(x, (w1, w2), 3)[1].sum(), [w1, w2])
    assert grads[0].abs().max() == 0 < grads[1].abs().max()


@every_backend
def test_long_input_in_many_chunks(backend):
    x, w1, w2 = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 300, 6), (6, 4), (6, 4))
    )
    reach = (torch.arange(300) % 90 + 1).expand(3, -1)
    results = []
    for name in (backend, "reference"):
        outs = causal_conv(x, (w1, w2), 297, reach[:, 3:], backend=name)
        results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), [x, w1, w2])])
    for a, e in zip(*results, strict=True):
        assert_close(a, e, tolerance=1e-12)
