"""The size study: a few mixers at several sizes, with tokens in proportion to parameters.

At the small sizes every row's learning rate is tuned. The size of about a million parameters is the size
``headline``, whose records are read where they are; its own tuning checks the rate that the small sizes
extrapolate to. A larger size, which has no rates to choose from, uses the extrapolated rate.
"""

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from hypermlp.costs.model import model_parameters
from hypermlp.errors import UserError
from hypermlp.jobs.cells import Outcome, print_status
from hypermlp.jobs.workers import Workers
from hypermlp.study.lm import run_lm, tune_and_run
from hypermlp.study.protocol import SIZES, Size, lm_cell, lm_cells
from hypermlp.study.reading import Row, Study, read_row
from hypermlp.train.recipe import Recipe, build

SCALE_ROWS = ("G-cg-q-12o", "S-p", "S-pc")
RATE_STEP = 2.0  # extrapolated rates are powers of this times the lowest tuned rate of the smallest size
HEADLINE = "1.06M"  # the size ``headline``: the size study does not train it
Points = dict[str, Size]
"""Sizes by their names, the smallest first."""
Measured = dict[str, Study]
"""What is recorded of every size."""


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
        reference=SCALE_ROWS[0],
        mad="",
    )


# All sizes take 600 steps; the sequences in a batch make the tokens 4.5 to 4.8 times the parameters.
PLANS: dict[str, Points] = {
    "full": {
        "0.16M": _scaled(48, 3, 5, 5, (2, 3, 4)),
        "0.36M": _scaled(80, 3, 11, 11, (2, 3, 4)),
        HEADLINE: replace(SIZES["headline"], rows=SCALE_ROWS),
        "2.7M": replace(_scaled(192, 5, 80, 16, (2, 3)), rates=()),
    },
    "smoke": {"small": _smoke(16), "middle": _smoke(32), "large": replace(_smoke(48), rates=())},
}


def find_points(plan: str, names: list[str]) -> Points:
    """Return the sizes of a plan by name; without names, all whose rates are tuned."""
    points = PLANS[plan]
    for name in names:
        if name not in points:
            raise UserError(f"unknown point {name!r}; allowed: {', '.join(points)}")
    return {name: size for name, size in points.items() if name in names or (not names and size.rates)}


def run_scale(points: Points, folder: Path, headline: Path, workers: Workers) -> list[Outcome]:
    """Train what has no record yet. Sizes whose rates are extrapolated come after the tuned ones."""
    outcomes = []
    for name, size in sorted(points.items(), key=lambda item: not item[1].rates):
        rows, place = list(size.rows), folder / name
        if name == HEADLINE:
            print_status(f"{name}: records of the size headline, from {headline}")
        elif size.rates:
            outcomes.append(tune_and_run(size, rows, place, workers))
        else:
            known = read_scale(points, folder, headline)
            rates = {row: rate for row in rows if (rate := extrapolated_rate(known, row, size))}
            if len(rates) < len(rows):
                raise UserError(f"{name} needs two sizes with tuned rates; include them in --points")
            print_status("extrapolated rates: " + ", ".join(f"{row} {rate:g}" for row, rate in rates.items()))
            outcomes.append(run_lm(list(lm_cells(size, rows, rates)), place, workers))
    return outcomes


def read_scale(points: Points, folder: Path, headline: Path) -> Measured:
    """Read the records of all sizes."""
    found: Measured = {}
    for name, size in sorted(points.items(), key=lambda item: not item[1].rates):
        place, rows = headline if name == HEADLINE else folder / name, {}
        for row in size.rows:
            rate = None if size.rates else extrapolated_rate(found, row, size)
            rows[row] = read_row(size, row, place, rate) if size.rates or rate else Row(row)
        found[name] = Study(size, rows)
    return {name: found[name] for name in points}


def extrapolated_rate(known: Measured, row: str, size: Size) -> float | None:
    """Return the rate of a row that the tuned sizes below ``size`` predict; None without two of them.

    The rate is a power of the number of parameters, fitted to the tuned rates and rounded to the grid. The
    number of parameters of a size is that of its model with HyperGLU, which all rows match.
    """
    target = _parameters(size)
    smaller = [
        (study.size, rate)
        for study in known.values()
        if study.size.rates and (rate := study.all_rows[row].rate) and _parameters(study.size) < target
    ]
    if len(smaller) < 2:
        return None
    sizes = [math.log(_parameters(size)) for size, _ in smaller]
    slope, offset = map(float, np.polyfit(sizes, [math.log(rate) for _, rate in smaller], 1))
    first = smaller[0][0].rates[0]
    steps = round((slope * math.log(target) + offset - math.log(first)) / math.log(RATE_STEP))
    return float(first * RATE_STEP**steps)


@functools.cache
def _parameters(size: Size) -> int:
    recipe: Recipe = build(Recipe, lm_cell(size, size.rows[0], 1).recipe, "")
    return model_parameters(recipe.model_config(recipe.vocab_size()))
