"""A statement of the paper, and how it is measured."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

BASES = {"R": "HyperMLP", "G": "HyperGLU"}


@dataclass(frozen=True)
class Check:
    statement: str
    where: str
    """In the paper: the environment and its label."""
    says: str
    """What is measured, in a sentence."""
    tolerance: float
    at_least: bool
    """Must the measured number reach the tolerance, rather than stay within it?"""
    measure: Callable[[str], float]
    """Of HyperMLP ("R") or HyperGLU ("G")."""
    bases: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.measure.__name__.replace("_", "-")


@dataclass(frozen=True)
class Outcome:
    name: str
    layer: str
    statement: str
    where: str
    says: str
    measured: float
    tolerance: float
    at_least: bool
    passed: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "measured": self.measured if math.isfinite(self.measured) else None
        }  # JSON has no NaN


CHECKS: list[Check] = []


Measurement = Callable[[str], float]


def check(
    statement: str,
    *,
    where: str,
    says: str,
    within: float | None = None,
    at_least: float | None = None,
    bases: tuple[str, ...] = ("R", "G"),
) -> Callable[[Measurement], Measurement]:
    """Adds a measurement to CHECKS, in the order of the files."""
    tolerance = within if within is not None else at_least
    assert tolerance is not None

    def register(measure: Measurement) -> Measurement:
        CHECKS.append(Check(statement, where, says, tolerance, at_least is not None, measure, bases))
        return measure

    return register


class NotFiniteError(ArithmeticError):
    """The operator gave a number that is none."""


def largest(*values: float) -> float:
    """``max``, but one that is not a number stays: Python's own drops it, or not, by its place."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def run(found: Check, base: str) -> Outcome:
    began = time.perf_counter()
    try:
        measured = float(found.measure(base))
    except NotFiniteError:
        measured = math.nan
    passed = measured >= found.tolerance if found.at_least else measured <= found.tolerance  # NaN is neither
    return Outcome(
        name=found.name,
        layer=BASES[base],
        statement=found.statement,
        where=found.where,
        says=found.says,
        measured=measured,
        tolerance=found.tolerance,
        at_least=found.at_least,
        passed=passed,
        seconds=time.perf_counter() - began,
    )
