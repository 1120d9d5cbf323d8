"""Choosing a learning rate for every row: train each at the rates of a size, with a seed that is not reported, and take the best."""

import math
from collections.abc import Callable
from typing import Any

from hypermlp.study.protocol import LmCell, Size, lm_cell

Losses = dict[float, float]  # learning rate -> loss; infinite if the training diverged
Train = Callable[[list[LmCell]], list[tuple[LmCell, dict[str, Any]]]]
WIDEST = 3  # how often a row may ask for a further rate


def tuned_rates(size: Size, rows: list[str], train: Train) -> dict[str, float]:
    """Return the best rate of every row; empty if the size has no rates to choose among.

    ``train`` runs cells and returns them with their results. With ``size.widen``, a row whose best rate lies at the edge of
    its grid is trained at the next rate beyond, until the best one lies within.
    """
    losses: dict[str, Losses] = {row: {} for row in rows}
    wanted = [lm_cell(size, row, size.tuning_seed, rate) for rate in size.rates for row in rows]
    for _ in range(WIDEST + 1):
        for cell, result in train(wanted) if wanted else []:
            losses[cell.mixer][cell.rate] = loss_of(result)
        if not size.widen:
            break
        further = {row: beyond_edge(found) for row, found in losses.items() if found}
        wanted = [
            lm_cell(size, row, size.tuning_seed, rate) for row, rate in further.items() if rate is not None
        ]
        if not wanted:
            break
    return {row: best_rate(found) for row, found in losses.items() if found}


def loss_of(result: dict[str, Any]) -> float:
    return math.inf if result["loss"] is None else float(result["loss"])


def best_rate(losses: Losses) -> float:
    """Return the rate with the lowest loss; of equal ones, the lower rate."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def beyond_edge(losses: Losses) -> float | None:
    """Return the next rate to try if the best one is the lowest or the highest, else None."""
    best = best_rate(losses)
    if best == max(losses):
        return 2 * best
    return best / 2 if best == min(losses) else None
