"""Scores of several checkpoints side by side, ranked as in the paper."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.reporting.table import Table


class Standing(NamedTuple):
    """The place of one model among several."""

    average_rank: float
    bests: int
    """Number of columns in which no other model is better."""


def ranks(scores: Sequence[float]) -> list[float]:
    """Return the rank of each score, 1 for the highest; equal scores share the mean of their ranks."""
    return [sum(other > one for other in scores) + (scores.count(one) + 1) / 2 for one in scores]


def standings(scores: Mapping[str, Sequence[float]]) -> dict[str, Standing]:
    """Return the standing of each model. ``scores`` holds the same columns for each, higher is better."""
    columns = [list(column) for column in zip(*scores.values(), strict=True)]
    ranked = [ranks(column) for column in columns]
    return {
        model: Standing(
            average_rank=statistics.fmean(column[place] for column in ranked),
            bests=sum(column[place] == max(column) for column in columns),
        )
        for place, model in enumerate(scores)
    }


def score_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a column for each checkpoint; the best of several scores is bold.

    ``rows`` are what ``hypermlp.evals.run.evaluate`` returned.
    """
    titles = list(dict.fromkeys(title for row in rows for title in row["scores"]))
    lines = [[title, *_cells([row["scores"].get(title) for row in rows])] for title in titles]
    shared = [title for title in titles if all(title in row["scores"] for row in rows)]
    if len(rows) > 1 and shared:
        placed = standings(
            {str(i): [_signed(row["scores"][title]) for title in shared] for i, row in enumerate(rows)}
        ).values()
        lines.append(["average rank", *(f"{standing.average_rank:.2f}" for standing in placed)])
        lines.append(["bests", *(str(standing.bests) for standing in placed)])
    lines.append(["parameters", *(f"{row['parameters']:,}" for row in rows)])
    return Table(["score", *_names([row["checkpoint"] for row in rows])], lines)


def _signed(score: dict[str, Any]) -> float:
    """Return the score so that higher is better."""
    return float(score["value"] if score["higher_is_better"] else -score["value"])


def _cells(scores: list[dict[str, Any] | None]) -> list[str]:
    """Return the cells of one line; None stands for a column that a checkpoint was not evaluated on."""
    best = max(_signed(score) for score in scores if score)
    cells = []
    for score in scores:
        error = f" ± {score['error']:.3f}" if score and score["error"] else ""
        text = f"{score['value']:.3f}{error}" if score else ""
        cells.append(f"**{text}**" if score and len(scores) > 1 and _signed(score) == best else text)
    return cells


def _names(checkpoints: list[str]) -> list[str]:
    """Return the names of the folders, or the whole paths where two folders have the same name."""
    short = [Path(checkpoint).name for checkpoint in checkpoints]
    return short if len(set(short)) == len(short) else checkpoints
