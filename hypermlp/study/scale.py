"""The scaling study: a few mixers at several sizes, with tokens in proportion to parameters.

At the small sizes every row's learning rate is tuned. The size of about a million parameters is the size
``headline``, whose records are read where they are; its own tuning checks the rate that the small sizes
extrapolate to. A larger size uses the extrapolated rate.
"""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hypermlp.costs.model import model_parameters
from hypermlp.errors import UserError
from hypermlp.jobs.cells import Outcome, print_status, recorded
from hypermlp.jobs.workers import Workers
from hypermlp.study.lm import run_lm, tune_and_run
from hypermlp.study.protocol import SIZES, Size, lm_cell, lm_cells
from hypermlp.study.tuning import Losses, best_rate, loss_of, untried_rates
from hypermlp.train.recipe import Recipe, build

SCALE_ROWS = ("G-cg-q-12o", "S-p", "S-pc")
RATE_STEP = 2.0  # rates are powers of this times the grid's first rate


@dataclass(frozen=True)
class Point:
    """One size of the scaling study."""

    name: str
    size: Size
    tuned: bool = True
    """Whether rates are tuned at this size; otherwise they are extrapolated from the tuned ones."""
    headline: bool = False
    """Whether the records are those of the size ``headline``, which this study does not train."""


def _scaled(width: int, layers: int, sequences: int, micro_batch: int, seeds: tuple[int, ...]) -> Size:
    """Return ``headline`` with another width. The rank of the mixes grows with the width, as 16 at 128."""
    return replace(
        SIZES["headline"],
        rows=SCALE_ROWS,
        changes=(
            *SIZES["headline"].changes,
            f"model.hidden_size={width}",
            f"model.num_hidden_layers={layers}",
            f"model.rank={width // 8}",
            f"training.batch_tokens={256 * sequences}",
            f"training.micro_batch={micro_batch}",
        ),
        seeds=seeds,
        fewer_seeds=(),
        evaluate=False,
    )


def _smoke(width: int) -> Size:
    return replace(
        SIZES["smoke"],
        rows=SCALE_ROWS,
        changes=(*SIZES["smoke"].changes, f"model.hidden_size={width}", "model.match_parameters=G-cg-q-12o"),
        rates=(1e-3, 2e-3),
        seeds=(2, 3),
        mad="",
    )


# All sizes take 600 steps; the sequences in a batch make the tokens 4.5 to 4.8 times the parameters.
PLANS = {
    "full": (
        Point("0.16M", _scaled(48, 3, 5, 5, (2, 3, 4))),
        Point("0.36M", _scaled(80, 3, 11, 11, (2, 3, 4))),
        Point("1.06M", replace(SIZES["headline"], rows=SCALE_ROWS), headline=True),
        Point("2.7M", _scaled(192, 5, 80, 16, (2, 3)), tuned=False),
    ),
    "smoke": (
        Point("small", _smoke(16)),
        Point("middle", _smoke(32)),
        Point("large", _smoke(48), tuned=False),
    ),
}


@dataclass(frozen=True)
class Measured:
    """The models of one row at one size."""

    point: Point
    row: str
    rate: float | None
    """The learning rate; None if it has not been chosen."""
    tuning: Losses
    """Losses of the tuning seed by learning rate."""
    results: dict[int, dict[str, Any]]
    """Results by seed."""

    @property
    def losses(self) -> dict[int, float]:
        """Losses by seed, without seeds that diverged."""
        return {seed: result["loss"] for seed, result in self.results.items() if result["loss"] is not None}

    @property
    def parameters(self) -> int:
        return int(self._any("parameters"))

    @property
    def training_flops(self) -> float:
        """FLOPs of the whole training: the backward pass costs twice the forward pass."""
        return 3.0 * self._any("forward_flops_per_token") * self._any("tokens")

    def _any(self, key: str) -> float:
        return float(next(result[key] for result in self.results.values() if key in result))


def find_points(plan: str, names: list[str]) -> list[Point]:
    """Return the points of a plan by name; without names, all whose rates are tuned."""
    points = {point.name: point for point in PLANS[plan]}
    for name in names:
        if name not in points:
            raise UserError(f"unknown point {name!r}; allowed: {', '.join(points)}")
    return [point for point in PLANS[plan] if point.name in names or (not names and point.tuned)]


def run_scale(points: list[Point], folder: Path, headline: Path, workers: Workers) -> list[Outcome]:
    """Train what has no record yet. Points whose rates are extrapolated come after the tuned ones."""
    outcomes = []
    for point in sorted(points, key=lambda point: not point.tuned):
        rows, place = list(point.size.rows), folder / point.name
        if point.headline:
            print_status(f"{point.name}: records of the size headline, from {headline}")
        elif point.tuned:
            outcomes.append(tune_and_run(point.size, rows, place, workers))
        else:
            known = read_scale(points, folder, headline)
            rates = {row: extrapolated_rate(known, row, point) for row in rows}
            chosen = {row: rate for row, rate in rates.items() if rate is not None}
            if len(chosen) < len(rows):
                raise UserError(f"{point.name} needs two sizes with tuned rates; include them in --points")
            print_status(
                "extrapolated rates: " + ", ".join(f"{row} {rate:g}" for row, rate in chosen.items())
            )
            outcomes.append(run_lm(list(lm_cells(point.size, rows, set(), chosen)), place, workers))
    return outcomes


def read_scale(points: list[Point], folder: Path, headline: Path) -> list[Measured]:
    """Read the records of all points that have any, the tuned ones first."""
    found: list[Measured] = []
    for point in sorted(points, key=lambda point: not point.tuned):
        place = headline if point.headline else folder / point.name
        new = []
        for row in point.size.rows:
            tuning, complete = _tuning(point, row, place)
            rate = best_rate(tuning) if complete else None
            if not point.tuned:
                rate = extrapolated_rate(found, row, point)
            cells = {seed: lm_cell(point.size, row, seed, rate) for seed in point.size.seeds} if rate else {}
            results = {seed: result for seed, cell in cells.items() if (result := recorded(place, cell))}
            if tuning or results:
                new.append(Measured(point, row, rate, tuning, results))
        found += new
    return found


def _tuning(point: Point, row: str, folder: Path) -> tuple[Losses, bool]:
    """Return the losses of the tuning seed, and whether they choose a rate."""
    losses: Losses = {}
    while wanted := untried_rates(point.size, row, losses) if point.tuned else []:
        for rate in wanted:
            result = recorded(folder, lm_cell(point.size, row, point.size.tuning_seed, rate))
            if result is not None:
                losses[rate] = loss_of(result)
        if any(rate not in losses for rate in wanted):
            return losses, False
    return losses, bool(losses)


def extrapolated_rate(known: list[Measured], row: str, point: Point) -> float | None:
    """Return the rate at ``point`` that the smaller tuned sizes predict; None without two of them.

    The rate is a power of the number of parameters, fitted to the tuned rates and rounded to the grid. The
    number of parameters of a point is that of its model with HyperGLU, which all rows match.
    """
    smaller = [
        (math.log(_parameters(each.point)), math.log(each.rate))
        for each in known
        if each.row == row and each.point.tuned and each.rate and _parameters(each.point) < _parameters(point)
    ]
    if len(smaller) < 2:
        return None
    sizes, rates = zip(*smaller, strict=True)
    slope, offset = map(float, np.polyfit(sizes, rates, 1))
    first = point.size.rates[0]
    steps = round((slope * math.log(_parameters(point)) + offset - math.log(first)) / math.log(RATE_STEP))
    return float(first * RATE_STEP**steps)


@functools.cache
def _parameters(point: Point) -> int:
    recipe: Recipe = build(Recipe, lm_cell(point.size, point.size.rows[0], 1).recipe, "")
    return model_parameters(recipe.model_config(recipe.vocab_size()))
