"""The contract's core cases, before anything is timed: a wrong kernel has no speed."""

import itertools

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import hyper_attention
from hypermlp.testing import assert_close, op_inputs


def check_backend(backend: str) -> int:
    """Compare outputs and gradients with the reference in float64; returns the number of cases, raises ValueError at a wrong one."""
    starts = (torch.arange(70) // 9 * 9).expand(2, -1)
    cases = list(
        itertools.product(
            ("relu", "glu"), ("", "1", "2", "12"), ("lag", "forward"), (None, starts), ((70, 70), (1, 70))
        )
    )
    for activation, mixes, layout, visible, (queries, keys) in cases:
        inputs = op_inputs(queries=queries, keys=keys, activation=activation, mixes=mixes).requires_grad()
        rows = None if visible is None else visible[:, -queries:]

        def run(name: str) -> list[Tensor]:
            out = hyper_attention(*inputs, activation=activation, layout=layout, starts=rows, backend=name)  # noqa: B023
            return [out, *torch.autograd.grad(out.square().sum(), inputs.tensors())]  # noqa: B023

        try:
            for actual, expected in zip(run(backend), run("reference"), strict=True):
                assert_close(actual, expected, tolerance=1e-10, floor=1e-3)
        except AssertionError as error:
            seen = "all" if rows is None else "packed documents"
            where = f"{activation}, mixes {mixes!r}, layout {layout!r}, sees {seen}, the last {queries} of {keys} positions"
            raise UserError(
                f"backend {backend!r} is wrong and will not be timed: {error} ({where})"
            ) from error
    return len(cases)
