"""Intervals for few seeds, and rank correlation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

RESAMPLES, SEED = 10_000, 0
# 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


def show_interval(interval: Interval | None, sign: str = "", digits: int = 3) -> str:
    """Return an interval as text; ``sign`` is "+" to show the sign of positive numbers too."""
    if interval is None:
        return "missing"
    value, low, high = (f"{number:{sign}.{digits}f}" for number in interval)
    return f"{value} ({low} to {high})" if math.isfinite(interval.low) else f"{value} (no interval)"


def t975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond the table, an approximation to 0.0015."""
    return T975[freedom - 1] if freedom <= len(T975) else 1.96 + 2.45 / freedom


def paired_effects(differences: list[list[float]]) -> list[Interval | None]:
    """Return the mean and its interval for each list of differences between two rows, one difference per
    seed.

    An empty list gives None. Two or three seeds say little about the variance of one pair, so all pairs
    share one estimate of it: rows differ in their mean, not in how much the seed changes them. If no pair
    has two seeds, the variance is unknown and the intervals are infinite.
    """
    freedom = sum(max(0, len(pair) - 1) for pair in differences)
    squares = sum(float(np.sum((np.array(pair) - np.mean(pair)) ** 2)) for pair in differences if pair)
    spread = t975(freedom) * math.sqrt(squares / freedom) if freedom else math.inf
    return [
        _centred(float(np.mean(pair)), spread / math.sqrt(len(pair))) if pair else None
        for pair in differences
    ]


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Return ``first - second`` for the seeds that both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def mean_interval(values: Iterable[float]) -> Interval | None:
    """Return the mean of the values with its interval from Student's t; None without values."""
    return paired_effects([list(values)])[0]


def _centred(mean: float, half: float) -> Interval:
    return Interval(mean, mean - half, mean + half)


def ranks(values: Any) -> np.ndarray:
    """Return the ranks along the last dimension, from 1; equal values share the mean of their ranks."""
    one, other = np.asarray(values)[..., :, None], np.asarray(values)[..., None, :]
    return np.asarray((one > other).sum(-1) + ((one == other).sum(-1) + 1) / 2)


def spearman(x: list[float], y: list[float]) -> Interval:
    """Return Spearman's rank correlation with a bootstrap interval over the rows."""
    a, b = np.array(x), np.array(y)
    draws = np.random.default_rng(SEED).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.nanpercentile(_correlation(a[draws], b[draws]), [2.5, 97.5])
    return Interval(float(_correlation(a, b)), float(low), float(high))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 if all values of ``x`` or of ``y`` are equal."""
    return float(np.nan_to_num(_correlation(np.array(x), np.array(y))))


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (each - each.mean(-1, keepdims=True) for each in (ranks(a), ranks(b)))
    with np.errstate(invalid="ignore"):  # a resample that repeats one row has no correlation
        return np.asarray((x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)))
