"""Results as a table: a row for each mixer, a column for each task, the published value beside ours."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypermlp.label import PAPER_ROWS
from hypermlp.mad.protocol import Cell
from hypermlp.mad.tasks import TASKS
from hypermlp.paper.mad import PAPER_COLUMNS
from hypermlp.paper.mad import PUBLISHED_BASELINES as PEERS
from hypermlp.reporting import table


@dataclass(frozen=True)
class Table:
    """``scores[mixer][task]``: the mean over settings of the best over learning rates and weight decays, between 0 and 1."""

    scores: dict[str, dict[str, float]]

    def average(self, mixer: str) -> float | None:
        """Over all six tasks; None if one is missing."""
        scores = self.scores[mixer]
        return sum(scores.values()) / len(TASKS) if len(scores) == len(TASKS) else None

    def table(self) -> table.Table:
        """Return a table in percent, with a row for each mixer and a column for each task that was run."""
        tasks = [task for task in TASKS if any(task in scores for scores in self.scores.values())]
        complete = len(tasks) == len(TASKS)
        rows = []
        for mixer, scores in self.scores.items():
            cells = [self._cell(scores.get(task), published_value(mixer, task)) for task in tasks]
            if complete:
                cells.append(self._cell(self.average(mixer), published_value(mixer)))
            rows.append([mixer, *cells])
        return table.Table(["mixer", *tasks, "average"] if complete else ["mixer", *tasks], rows)

    def __str__(self) -> str:
        return self.table().markdown()

    @staticmethod
    def _cell(ours: float | None, published: float | None) -> str:
        shown = "" if ours is None else f"{100 * ours:.1f}"
        return shown if published is None else f"{shown} ({published:.1f})"


def published_value(mixer: str, task: str | None = None) -> float | None:
    """Of a task, or the average. Of a label: the paper's. Of a peer: its authors' or the benchmark's."""
    if mixer in PAPER_ROWS:
        return float(getattr(PAPER_ROWS[mixer], PAPER_COLUMNS[task] if task else "mad_average"))
    if mixer not in PEERS:
        return None
    scores = dict(zip(PAPER_COLUMNS, PEERS[mixer], strict=True))
    return scores[task] if task else sum(scores.values()) / len(scores)


def summarize(results: Iterable[tuple[Cell, dict[str, Any]]]) -> Table:
    best: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)  # by setting
    for cell, result in results:
        settings = best[cell.mixer, cell.task]
        setting = repr(sorted(cell.settings.items()))
        settings[setting] = max(settings.get(setting, 0.0), result["score"])
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for (mixer, task), settings in best.items():
        scores[mixer][task] = sum(settings.values()) / len(settings)
    return Table(dict(scores))
