"""How the native kernels divide their work: over threads, row blocks and heads."""

from functools import partial

import pytest
import torch

from hypermlp.ops import Mix, hyper_attention, native
from hypermlp.testing import op_inputs


@pytest.mark.parametrize("activation", ["relu", "glu"])
@pytest.mark.parametrize("layout", ["lag", "forward"])
def test_the_number_of_threads_changes_no_bit(activation, layout, set_threads):
    sizes = {"batch": 1, "heads": 1, "qk_dim": 12, "vo_dim": 20, "rank": 7, "dtype": torch.float32}
    inputs = op_inputs(queries=500, activation=activation, **sizes).requires_grad()
    starts = torch.arange(500)[None] // 190 * 190
    results = {}
    for threads in (1, 2, 4, 8):
        set_threads(threads)
        found = []
        for rows in (None, starts):
            out = hyper_attention(
                *inputs, activation=activation, layout=layout, starts=rows, backend="native"
            )
            found += [out, *torch.autograd.grad(out.square().sum(), inputs.tensors())]
        results[threads] = found
    for threads in (2, 4, 8):
        for actual, expected in zip(results[threads], results[1], strict=True):
            assert torch.equal(actual, expected), f"{threads} threads"


def test_the_backward_has_work_for_64_cores_at_batch_1():
    """Every row block of every head is a task; the gradients that they share are added in a fixed order."""
    assert native.backward_tasks(1, 2, 8192, 8192) == 2 * 179
    assert native.backward_tasks(1, 2, 2048, 2048) == 2 * 22
    assert native.backward_tasks(1, 1, 4096, 4096) == 43
    assert native.backward_tasks(1, 2, 4096, 4096) >= 64
    assert native.backward_tasks(32, 2, 128, 128) == 32 * 2 * 2
    for keys in (1, 36, 37, 1024):
        assert native.backward_tasks(3, 2, 1, keys) == 6


@pytest.mark.thorough
def test_long_sequences_are_computed_head_by_head(set_threads):
    """The results are those of each head alone, bit for bit; the values of one head are packed at a time."""
    set_threads(1)
    inputs = op_inputs(batch=1, queries=800, keys=3200, vo_dim=512, rank=2).requires_grad()
    q, k, v, mix1, mix2 = inputs

    def of_head(mix, head):
        return Mix(mix.diag[head::2], mix.left[head::2], mix.right[head::2], mix.gate[:, :, head::2])

    def gradients(out):
        return torch.autograd.grad(out.square().sum(), inputs.tensors())

    attend = partial(hyper_attention, activation="glu", backend="native")
    native.scratch_peak()
    with torch.no_grad():
        together = attend(*inputs)
    assert native.scratch_peak() < v.nbytes, "the values of both heads were packed at once"
    heads = [
        attend(*(x[:, :, head::2] for x in (q, k, v)), of_head(mix1, head), of_head(mix2, head))
        for head in range(2)
    ]
    alone = torch.cat(heads, dim=2)
    assert torch.equal(together, alone)
    for actual, expected in zip(gradients(attend(*inputs)), gradients(alone), strict=True):
        assert torch.equal(actual, expected)
