"""The gradient of a row that sees one key: the norm cancels it, so errors of the norm show."""

import pytest
import torch

from hypermlp.ops import hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS

WIDTH = 64
NAMES = [name for name in BACKENDS if name not in ("sdpa", "triton")]  # softmax alone; a process of its own


@pytest.mark.parametrize("queries", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", NAMES)
def test_a_row_that_sees_one_key_has_no_gradient_but_rounding(backend, dtype, queries):
    """The scores are small sums of large terms, of which a sum in another order differs by many roundings."""
    refusal = BACKENDS[backend].refusal(Request("attention", "cpu", dtype, "relu", False))
    if refusal is not None:
        pytest.skip(refusal)
    generator = torch.Generator().manual_seed(3)
    shape = (40, queries, 1, WIDTH)
    q, k, v, do = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))
    size = q.square().sum(-1, keepdim=True)
    k = k - q * ((q * k).sum(-1, keepdim=True) - 0.01) / size  # the score of a query with its own key is 0.01
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    starts = torch.arange(queries).expand(40, queries)  # every query sees its own key alone
    given = q.clone().requires_grad_()
    settings = {"activation": "relu", "eps": 1e-30, "starts": starts, "backend": backend}
    out = hyper_attention(given, k, v, **settings)
    (gradient,) = torch.autograd.grad(out, given, do)

    score = (q.double() * k.double()).sum(-1, keepdim=True).abs()
    terms = (do.double() * v.double()).abs().sum(-1, keepdim=True) / score * k.double().abs()
    assert (gradient.double().abs() / terms).max() < 16 * torch.finfo(dtype).eps
