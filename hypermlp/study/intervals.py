"""Rank correlation and intervals, for few seeds."""

import math
from typing import Any, NamedTuple

import numpy as np

RESAMPLES, SEED = 10_000, 0
# Student's t, 97.5 %, for 1, 2, ... degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
        2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


def t975(freedom: int) -> float:
    return T975[freedom - 1] if freedom <= len(T975) else 1.96 + 2.45 / freedom  # to a thousandth


def paired_effects(differences: list[list[float]]) -> list[Interval | None]:
    """For each list of differences between two rows, one number a seed: the mean and its interval; None for an empty list.

    With two or three seeds a pair knows its own variance badly, so all pairs share one estimate of it: rows differ in their mean,
    not in how much a seed moves them. With one seed each there is no interval, and it is infinite.
    """
    freedom = sum(max(0, len(each) - 1) for each in differences)
    squares = sum(float(np.sum((np.array(each) - np.mean(each)) ** 2)) for each in differences if each)
    spread = t975(freedom) * math.sqrt(squares / freedom) if freedom else math.inf
    found: list[Interval | None] = []
    for each in differences:
        mean = float(np.mean(each)) if each else 0.0
        half = spread / math.sqrt(len(each)) if each else 0.0
        found.append(Interval(mean, mean - half, mean + half) if each else None)
    return found


def ranks(values: Any) -> np.ndarray:
    """Along the last dimension, from 1; equal values share the mean of their ranks."""
    one, other = np.asarray(values)[..., :, None], np.asarray(values)[..., None, :]
    return np.asarray((one > other).sum(-1) + ((one == other).sum(-1) + 1) / 2)


def spearman(x: list[float], y: list[float]) -> Interval:
    """Rank correlation with a bootstrap interval over the rows."""
    a, b = np.array(x), np.array(y)
    draws = np.random.default_rng(SEED).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.nanpercentile(_correlation(a[draws], b[draws]), [2.5, 97.5])
    return Interval(float(_correlation(a, b)), float(low), float(high))


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (each - each.mean(-1, keepdims=True) for each in (ranks(a), ranks(b)))
    with np.errstate(invalid="ignore"):  # a resample of one row only has none
        return np.asarray((x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)))
