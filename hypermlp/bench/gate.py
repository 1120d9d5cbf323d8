"""The core cases of the operator's contract, checked before anything is timed."""

import itertools

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.testing import OpInputs, assert_close, op_inputs

LENGTH = 70
STARTS = (torch.arange(LENGTH) // 9 * 9).expand(2, -1)  # documents of nine positions
CASES = list(
    itertools.product(
        ("relu", "glu", "softmax"), ("", "1", "2", "12"), ("lag", "forward"), (None, STARTS), (LENGTH, 1)
    )
)


def check_backend(backend: str) -> int:
    """Compare outputs and gradients with the reference in float64; return the number of cases that it
    computes.

    Raises UserError at the first case that differs.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    cases = [case for case in CASES if _computes(backend, *case[:2])]
    for activation, mixes, layout, starts, queries in cases:
        inputs = op_inputs(queries=queries, keys=LENGTH, activation=activation, mixes=mixes).requires_grad()
        settings = {
            "activation": activation,
            "layout": layout,
            "starts": None if starts is None else starts[:, -queries:],
        }
        results = (_results(inputs, backend=name, **settings) for name in (backend, "reference"))
        try:
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected, tolerance=1e-10, floor=1e-3)
        except AssertionError as error:
            visible = "all visible" if starts is None else "packed documents"
            raise UserError(
                f"backend {backend!r} is wrong and will not be timed: {error} ({activation}, mixes {mixes!r},"
                f" layout {layout!r}, {queries} queries of {LENGTH} positions, {visible})"
            ) from error
    return len(cases)


def _computes(backend: str, activation: str, mixes: str) -> bool:
    request = Request("attention", "cpu", torch.float64, activation, bool(mixes))
    return BACKENDS[backend].refusal(request) is None


def _results(inputs: OpInputs, **settings: object) -> list[Tensor]:
    """Return the output and the gradient of every input."""
    out = hyper_attention(*inputs, **settings)  # type: ignore[arg-type]
    return [out, *torch.autograd.grad(out.square().sum(), inputs.tensors())]
