"""What a check of a statement is, and the arithmetic that checks share.

A check is a function of a base, "R" for HyperMLP or "G" for HyperGLU, that returns one number. The first
sentence of its docstring is the statement; the rest, after "Measured:", describes the number.

NaN fails every check: a comparison that compares nothing, or whose precondition does not hold, returns it.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hypermlp.paper.statements import cite

BASES = {"R": "HyperMLP", "G": "HyperGLU"}

Measurement = Callable[[str], float]


@dataclass(frozen=True)
class Check:
    """A statement of the paper and the function that measures it."""

    statement: str
    where: str
    """The places in the paper: numbers and titles."""
    quantity: str
    """What is measured."""
    tolerance: float
    at_least: bool
    """True if the measured number must reach the tolerance, False if it must not exceed it."""
    measure: Measurement
    bases: str
    """The bases, "R" or "G" or both, that the statement is about."""

    @property
    def name(self) -> str:
        return self.measure.__name__.replace("_", "-")

    def run(self, base: str) -> "Outcome":
        """Measure the statement for one base."""
        began = time.perf_counter()
        try:
            measured = float(self.measure(base))
        except ArithmeticError:  # a non-finite result of the operator, or too little to compare
            measured = math.nan
        passed = measured >= self.tolerance if self.at_least else measured <= self.tolerance
        return Outcome(self, BASES[base], measured, passed, time.perf_counter() - began)


@dataclass(frozen=True)
class Outcome:
    """The result of a check for one layer."""

    check: Check
    layer: str
    measured: float
    passed: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as ``hypermlp verify --json -`` prints it; JSON has no NaN."""
        check = self.check
        return {
            "name": check.name,
            "layer": self.layer,
            "statement": check.statement,
            "where": check.where,
            "says": check.quantity,
            "measured": self.measured if math.isfinite(self.measured) else None,
            "tolerance": check.tolerance,
            "at_least": check.at_least,
            "passed": self.passed,
            "seconds": self.seconds,
        }


def check(
    *where: str, within: float | None = None, at_least: float | None = None, bases: str = "RG"
) -> Callable[[Measurement], Check]:
    """Turn a measurement into a check.

    Args:
        where: places in the paper, each a kind and a label of ``STATEMENTS``.
        within: the measured number must not exceed this; or
        at_least: it must reach this.
        bases: the bases that the statement is about.
    """
    tolerance = at_least if within is None else within
    assert tolerance is not None

    def make(measure: Measurement) -> Check:
        statement, _, quantity = " ".join((measure.__doc__ or "").split()).partition(". Measured: ")
        texts = (statement, "; ".join(map(cite, where)), quantity.removesuffix("."))
        return Check(*texts, tolerance, at_least is not None, measure, bases)

    return make


def size(x: Tensor) -> float:
    """Return the largest magnitude in a tensor."""
    return float(x.abs().max())


def far(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return size(one - other)


def largest(values: Iterable[float]) -> float:
    """Return the largest value; NaN if one of them is NaN, or if there are none."""
    listed = list(values)
    return math.nan if not listed or any(map(math.isnan, listed)) else max(listed)


def provided(precondition: bool, measured: float) -> float:
    """Return the measured number, or NaN if the precondition of the comparison does not hold."""
    return measured if precondition else math.nan
