"""The contract of a backend, checked before anything is timed."""

import itertools

import torch

from hypermlp.errors import UserError
from hypermlp.ops import contract
from hypermlp.ops.dispatch import BACKENDS

LENGTH = 70
VARIANTS = list(
    itertools.product(("relu", "glu", "softmax"), ("", "1", "2", "12"), ("lag", "forward"), ("all", "packed"))
)


def check_backend(backend: str) -> int:
    """Compare outputs and gradients with the reference in float64; return the number of cases that the
    backend computes.

    Raises UserError at the first case that differs.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; allowed: {', '.join(map(repr, BACKENDS))}")
    if reason := BACKENDS[backend].unavailable():
        raise UserError(f"backend {backend!r} is not available: {reason}")
    cases = [
        case for case in contract.cases(VARIANTS, keys=LENGTH) if case.refusal(backend, torch.float64) is None
    ]
    for case in cases:
        try:
            contract.check(case, backend, torch.float64, tolerance=1e-10)
        except AssertionError as error:
            raise UserError(
                f"backend {backend!r} is wrong and will not be timed: {error} ({case})"
            ) from error
    return len(cases)
