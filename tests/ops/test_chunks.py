"""A sliding window in chunks equals the definition."""

import pytest
import torch

from hypermlp.ops import reference, sdpa
from hypermlp.ops.arguments import Attention
from hypermlp.ops.chunks import MIN_QUERIES, attend_in_chunks
from hypermlp.testing import assert_close, op_inputs


@pytest.mark.parametrize("window", [1, 5, MIN_QUERIES + 6])
@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("activation", ["glu", "softmax"])
def test_outputs_and_gradients(activation, before, window):
    before = min(before, window - 1)
    queries, mixes = 150, "12" if activation == "glu" else ""
    inputs = op_inputs(
        queries=queries, keys=before + queries, activation=activation, mixes=mixes
    ).requires_grad()
    positions = before + torch.arange(queries)
    documents = torch.where(positions < 90, 0, 90)
    starts = torch.maximum(documents, positions - window + 1).expand(2, -1).contiguous()
    starts[1, :3] = positions[:3] + 1  # padding
    starts = starts.cummax(1).values.minimum(positions + 1)
    arguments = Attention(*inputs, starts, activation, "lag", 1e-12)
    operator = sdpa.attention if activation == "softmax" else reference.attention
    seen = []

    def counted(given):
        seen.append(given.q.shape[1] * given.q.shape[0] * given.k.shape[1])
        return operator(given)

    out, expected = attend_in_chunks(counted, arguments, window), reference.attention(arguments)
    assert_close(out, expected, tolerance=1e-10)
    size = max(MIN_QUERIES, window)
    assert sum(seen) <= 2 * (queries + size) * (size + window)  # scores of two sequences
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    found, wanted = (torch.autograd.grad((y * weights).sum(), inputs.tensors()) for y in (out, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs, tolerance=1e-10)
