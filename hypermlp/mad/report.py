"""Scores of the benchmark, as numbers and as a table with the published values beside ours."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hypermlp.label import PAPER_ROWS
from hypermlp.mad.protocol import MadCell
from hypermlp.mad.tasks import TASKS
from hypermlp.paper.mad import PAPER_COLUMNS, PUBLISHED_BASELINES
from hypermlp.reporting.table import Table

AVERAGE = "average"
PUBLISHED: dict[str, dict[str, float]] = {
    label: {
        column: getattr(row, field) for column, field in (PAPER_COLUMNS | {AVERAGE: "mad_average"}).items()
    }
    for label, row in PAPER_ROWS.items()
} | {
    name: dict(zip(TASKS, scores, strict=True)) | {AVERAGE: fmean(scores)}
    for name, scores in PUBLISHED_BASELINES.items()
}


@dataclass(frozen=True)
class Scores:
    """Scores of mixers by task; ``print`` shows them as a Markdown table in percent.

    Attributes:
        scores: ``scores[mixer][task]``, accuracy between 0 and 1: the mean over the task's settings of the
            best score over learning rates and weight decays.
    """

    scores: dict[str, dict[str, float]]

    def average(self, mixer: str) -> float | None:
        """Return the mean over all six tasks; None if one is missing."""
        scores = self.scores.get(mixer, {})
        return fmean(scores.values()) if len(scores) == len(TASKS) else None

    def score(self, mixer: str, column: str) -> float | None:
        """Return the accuracy on a task, or the mean for AVERAGE; None if it is missing."""
        return self.average(mixer) if column == AVERAGE else self.scores.get(mixer, {}).get(column)

    def cell(self, mixer: str, column: str, published_as: str | None = None, missing: str = "") -> str:
        """Return the score in percent, with the published value in brackets if there is one.

        ``column`` is a task or AVERAGE. ``published_as`` is the published name of the mixer if it differs;
        ``missing`` stands for a score that there is not.
        """
        ours = self.score(mixer, column)
        published = published_value(published_as or mixer, column)
        shown = missing if ours is None else f"{100 * ours:.1f}"
        return shown if published is None else f"{shown} ({published:.1f})".strip()

    def table(self) -> Table:
        """Return a table with a row for each mixer and a column for each task that was run."""
        tasks = [task for task in TASKS if any(task in scores for scores in self.scores.values())]
        columns = [*tasks, AVERAGE] if len(tasks) == len(TASKS) else tasks
        rows = [[mixer, *(self.cell(mixer, column) for column in columns)] for mixer in self.scores]
        return Table(["mixer", *columns], rows)

    def __str__(self) -> str:
        return self.table().markdown()


def published_value(mixer: str, column: str = AVERAGE) -> float | None:
    """Return the published score in percent, on a task or on average; None if there is none.

    The values of labels are the paper's, those of baselines their authors' or the benchmark's.
    """
    return PUBLISHED.get(mixer, {}).get(column)


def summarize(results: Iterable[tuple[MadCell, dict[str, Any]]]) -> Scores:
    """Return the scores of cells and their results."""
    best: dict[tuple[str, str], dict[str, float]] = defaultdict(
        dict
    )  # (mixer, task) -> setting -> best score
    for cell, result in results:
        settings, name = best[cell.mixer, cell.task], repr(sorted(cell.settings.items()))
        settings[name] = max(settings.get(name, 0.0), result["score"])
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for (mixer, task), settings in best.items():
        scores[mixer][task] = fmean(settings.values())
    return Scores(dict(scores))
