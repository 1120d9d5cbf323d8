"""What only the blocked backend has: blocks, their geometry, linear memory."""

import pytest
import torch

from hypermlp.bench.measure import peak_bytes
from hypermlp.ops import blocked, hyper_attention
from hypermlp.ops.score_block import ScoreBlock
from hypermlp.testing import assert_close, op_inputs


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64, 1000])
@pytest.mark.parametrize("layout", ["lag", "forward"])
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 7])])
def test_block_size_does_not_matter(monkeypatch, rows, layout, starts):
    inputs = op_inputs(queries=50, keys=61).requires_grad()
    expected = hyper_attention(*inputs, layout=layout, starts=starts, backend="reference")
    grads = torch.autograd.grad(expected.square().sum(), inputs.tensors())
    monkeypatch.setattr(blocked, "MIN_ROWS", rows)
    monkeypatch.setattr(blocked, "MAX_ROWS", rows)
    actual = hyper_attention(*inputs, layout=layout, starts=starts, backend="blocked")
    assert_close(actual, expected, tolerance=1e-10)
    for a, e in zip(torch.autograd.grad(actual.square().sum(), inputs.tensors()), grads, strict=True):
        assert_close(a, e, tolerance=1e-10)


def test_the_aligned_view_is_the_ordinary_one_by_lag():
    block = ScoreBlock(
        range(2, 5), offset=1, batch=2, layout="lag", starts=None, first_key=0, device=torch.device("cpu")
    )
    buffer = torch.full(block.buffer_shape(1), torch.nan)
    scores = torch.arange(1.0, 1 + 2 * 3 * 6).view(2, 3, 6)  # queries at positions 3, 4, 5 against 6 keys
    block.ordinary(buffer).copy_(scores)
    block.mask_(buffer)
    aligned = block.aligned(buffer).view(2, 3, 6)
    for b in range(2):
        for row, position in enumerate((3, 4, 5)):
            for lag in range(6):
                expected = scores[b, row, position - lag] if lag <= position else 0.0
                assert aligned[b, row, 5 - lag] == expected
    assert (block.ordinary(buffer)[0, 0, 4:] == 0).all()


@pytest.mark.thorough
def test_memory_grows_linearly():
    def memory(length: int) -> int:
        inputs = op_inputs(
            batch=1, queries=length, qk_dim=8, vo_dim=32, rank=4, dtype=torch.float32
        ).requires_grad()
        return peak_bytes(
            lambda: torch.autograd.grad(hyper_attention(*inputs, backend="blocked").sum(), inputs.tensors())
        )

    assert memory(4096) / memory(1024) < 4 * 1.3
