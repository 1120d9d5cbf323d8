"""Results as a table: a row for each mixer, a column for each task, the published value beside ours."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypermlp.label import PAPER_ROWS
from hypermlp.mad.protocol import Cell
from hypermlp.mad.tasks import TASKS

PAPER_COLUMNS = {
    "in-context-recall": "in_context_recall",
    "noisy-in-context-recall": "noisy_recall",
    "fuzzy-in-context-recall": "fuzzy_recall",
    "memorization": "memorization",
    "compression": "compression",
    "selective-copying": "selective_copying",
}
# Percent over the full grid, in the order of the columns, as the DeltaNet paper tabulates them: its own, and the MAD paper's
PEERS = {
    "softmax": (94.1, 86.8, 29.8, 85.2, 51.6, 99.6),
    "mamba": (90.4, 90.1, 6.7, 89.5, 52.7, 86.3),
    "gla": (80.8, 81.6, 6.9, 63.3, 38.8, 88.6),
    "deltanet": (100.0, 100.0, 35.7, 52.8, 42.2, 100.0),
}


@dataclass(frozen=True)
class Table:
    """``scores[mixer][task]``: the mean over settings of the best over learning rates and weight decays, between 0 and 1."""

    scores: dict[str, dict[str, float]]

    def average(self, mixer: str) -> float | None:
        """Over all six tasks; None if one is missing."""
        scores = self.scores[mixer]
        return sum(scores.values()) / len(TASKS) if len(scores) == len(TASKS) else None

    def __str__(self) -> str:
        """Markdown, in percent."""
        tasks = [task for task in TASKS if any(task in scores for scores in self.scores.values())]
        columns = [*tasks, *(["average"] if len(tasks) == len(TASKS) else [])]
        lines = ["| mixer | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
        for mixer, scores in self.scores.items():
            cells = [self._cell(scores.get(task), published_value(mixer, task)) for task in tasks]
            if "average" in columns:
                cells.append(self._cell(self.average(mixer), published_value(mixer)))
            lines.append(f"| {mixer} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

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
