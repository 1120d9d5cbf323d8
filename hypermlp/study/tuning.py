"""Choose the learning rate of a row: train it at several rates, with a seed that is not reported."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from hypermlp.reporting.table import Table
from hypermlp.study.protocol import LmCell, Size, lm_cell

Losses = dict[float, float]  # learning rate -> loss; infinite if the training diverged
Results = Iterable[tuple[LmCell, dict[str, Any]]]
MOST_EXTRA_RATES = 3  # rates that a row may add to its grid


def tuned_rates(size: Size, rows: list[str], train: Callable[[list[LmCell]], Results]) -> dict[str, float]:
    """Return the best rate of every row; empty if the size has no rates to choose from.

    ``train`` runs cells and returns them with their results. With ``size.widen``, a row whose best rate
    lies at the edge of its grid is trained at the next rate beyond, until the best one lies within.
    """
    losses: dict[str, Losses] = {row: {} for row in rows}
    while wanted := [(row, rate) for row in rows for rate in untried_rates(size, row, losses[row])]:
        wanted.sort(key=lambda item: item[1])  # all rows at one rate, then at the next; the sort is stable
        for cell, result in train([lm_cell(size, row, size.tuning_seed, rate) for row, rate in wanted]):
            losses[cell.mixer][cell.rate] = loss_of(result)
    return {row: best_rate(tried) for row, tried in losses.items() if tried}


def untried_rates(size: Size, row: str, tried: Losses) -> list[float]:
    """Return the rates that a row must still be trained at before its rate can be chosen."""
    rates = size.rates_of(row)
    missing = [rate for rate in rates if rate not in tried]
    if missing or not tried or not size.widen or len(tried) >= len(rates) + MOST_EXTRA_RATES:
        return missing
    beyond = beyond_edge(tried)
    return [] if beyond is None else [beyond]


def possible_rates(size: Size, row: str) -> list[float]:
    """Return all rates that a row of a size may have been trained at with the tuning seed."""
    rates = size.rates_of(row)
    beyond = [2.0**power for power in range(1, MOST_EXTRA_RATES + 1)] if rates else []
    lower, higher = [min(rates) / factor for factor in beyond], [max(rates) * factor for factor in beyond]
    return sorted({*lower, *rates, *higher})


def considered(size: Size, row: str, losses: Losses) -> Losses:
    """Return the losses that ``tuned_rates`` chooses from: a folder may have records at other rates too."""
    found = {rate: losses[rate] for rate in size.rates_of(row) if rate in losses}
    while (untried := untried_rates(size, row, found)) and untried[0] in losses:
        found[untried[0]] = losses[untried[0]]
    return found


def loss_of(result: dict[str, Any]) -> float:
    """Return the loss of a result; infinite if the training diverged."""
    return math.inf if result["loss"] is None else float(result["loss"])


def show_loss(loss: float, digits: int = 3) -> str:
    """Return a loss as text; an infinite one is that of a training that diverged."""
    return f"{loss:.{digits}f}" if math.isfinite(loss) else "diverged"


def best_rate(losses: Losses) -> float:
    """Return the rate with the lowest loss; of equal ones, the lower rate."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def beyond_edge(losses: Losses) -> float | None:
    """Return the next rate to try if the best one is the lowest or the highest, else None."""
    best = best_rate(losses)
    if best == max(losses):
        return 2 * best
    return best / 2 if best == min(losses) else None


def tuning_table(results: Results) -> Table:
    """Return the losses by learning rate (lines) and row (columns), with the mean over the rows."""
    losses: dict[float, dict[str, float]] = defaultdict(dict)
    for cell, result in results:
        losses[cell.rate][cell.mixer] = loss_of(result)
    rows = list(next(iter(losses.values())))
    lines = [
        [
            f"{rate:g}",
            *(show_loss(loss, 4) for loss in (*map(found.__getitem__, rows), fmean(found.values()))),
        ]
        for rate, found in sorted(losses.items())
    ]
    return Table(["learning rate", *rows, "mean"], lines)
