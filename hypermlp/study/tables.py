"""Tables of a study. A value that the study should have and that no record gives is shown as missing."""

import math
from collections.abc import Iterable
from typing import Any

from hypermlp.label import PAPER_ROWS, PaperRow
from hypermlp.mad.report import AVERAGE, published_value
from hypermlp.mad.tasks import TASKS
from hypermlp.paper.variants import LOSS_THRESHOLDS, STEPS_PER_EVALUATION
from hypermlp.reporting.table import Columns, Table
from hypermlp.study.intervals import show_interval
from hypermlp.study.summary import PAPER_LABEL, Study
from hypermlp.study.thresholds import FRACTIONS, THRESHOLD_ROW, steps_to
from hypermlp.study.tuning import loss_of

SHORT = {
    "in-context-recall": "in-context",
    "noisy-in-context-recall": "noisy",
    "fuzzy-in-context-recall": "fuzzy",
    "memorization": "memorize",
    "compression": "compress",
    "selective-copying": "copy",
    AVERAGE: "MAD average",
}
MISSING, NOT_REACHED = "missing", "not reached"


def mad_tasks(study: Study) -> list[str]:
    """Return the MAD tasks that the study should have, and those that any row was run on."""
    planned = (study.size.mad_tasks or TASKS) if study.size and study.size.mad else ()
    run = {task for scores in study.mad.scores.values() for task in scores}
    return [task for task in SHORT if task in planned or task in run]


def study_table(study: Study) -> Table:
    """Return a line for each row that the study should have, with the paper's values in brackets.

    For the paper's rows at a size with MAD, these are all columns of the paper's Table 1.
    """
    tasks = mad_tasks(study)
    mad_columns = [*tasks, AVERAGE] if tasks else []
    rate = ["learning rate"] if study.tuned else []
    titles = [
        "label",
        *rate,
        "parameters",
        "MFLOPs/token",
        "seeds",
        "loss (paper)",
        *_threshold_titles(study),
    ]
    lines = [
        [
            *_cells(study, label),
            *_steps(study, label),
            *(_mad(study, label, column) for column in mad_columns),
        ]
        for label in study.labels
    ]
    return Table([*titles, *(SHORT[column] for column in mad_columns)], lines)


def losses_table(results: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    """Return a line for each language model, the lowest loss first, from the cells' settings and results.

    A training that diverged has no loss and no costs.
    """
    rows = [settings | settings["recipe"]["training"] | result for settings, result in results]
    columns: Columns = [
        ("mixer", "{mixer}"),
        ("seed", "{seed}"),
        ("loss", lambda row: "diverged" if row["loss"] is None else f"{row['loss']:.4f}"),
        ("parameters", lambda row: "" if row["loss"] is None else f"{row['parameters']:,}"),
        (
            "MFLOPs/token",
            lambda row: "" if row["loss"] is None else f"{row['forward_flops_per_token'] / 1e6:.2f}",
        ),
    ]
    return Table.of(sorted(rows, key=loss_of), columns)


def rates_table(study: Study) -> Table:
    """Return the losses of the tuning seed by row and learning rate, the chosen rate in bold."""
    rates = sorted({rate for losses in study.tuning.values() for rate in losses})
    lines = []
    for label, losses in study.tuning.items():
        row, line = study.rows.get(label), [label]
        for rate in rates:
            loss = losses.get(rate)
            shown = "" if loss is None else f"{loss:.3f}" if math.isfinite(loss) else "diverged"
            line.append(f"**{shown}**" if row is not None and row.rate == rate else shown)
        lines.append(line)
    return Table(["label", *(f"at {rate:g}" for rate in rates)], lines)


def agreement_table(study: Study) -> Table:
    """Return the rank correlations of our MAD columns with the paper's."""
    lines = [
        [SHORT[column], f"{rows}", show_interval(interval, digits=2)]
        for column, (rows, interval) in study.mad_correlations.items()
    ]
    return Table(["MAD column", "rows", "rank correlation with the paper"], lines)


def _cells(study: Study, label: str) -> list[str]:
    """Return the first columns of a line, up to the loss."""
    stands_for = f" (for {PAPER_LABEL[label]})" if label in PAPER_LABEL else ""
    row, paper = study.rows.get(label), _paper_row(label)
    published = "" if paper is None else f" ({paper.loss:.3f})"
    if row is None:
        return [label + stands_for, *([MISSING] if study.tuned else []), *[MISSING] * 3, MISSING + published]
    diverged = f" ({row.diverged} diverged)" if row.diverged else ""
    return [
        label + stands_for,
        *([] if row.rate is None else [f"{row.rate:g}"]),
        f"{row.parameters:,}",
        f"{row.forward_flops_per_token / 1e6:.2f}",
        f"{len(row.losses)}{diverged}",
        f"{row.loss:.3f}{published}",
    ]


def _paper_row(label: str) -> PaperRow | None:
    return PAPER_ROWS.get(PAPER_LABEL.get(label, label))


def _threshold_titles(study: Study) -> list[str]:
    if THRESHOLD_ROW not in study.labels:
        return []
    losses = [f"{loss:.3f}" for loss in study.thresholds] or [
        f"{THRESHOLD_ROW}'s loss at {fraction:.0%}" for fraction in FRACTIONS
    ]
    return [f"steps to {loss} ({paper})" for loss, paper in zip(losses, LOSS_THRESHOLDS, strict=True)]


def _steps(study: Study, label: str) -> list[str]:
    """Return the steps of a row to the thresholds of our study, with the paper's steps to its own."""
    if THRESHOLD_ROW not in study.labels:
        return []
    row, paper = study.rows.get(label), _paper_row(label)
    ours = [MISSING] * len(FRACTIONS)
    if row is not None and study.thresholds:
        ours = [_count(steps_to(row.curve, loss)) for loss in study.thresholds]
    if paper is None:
        return ours
    published = [
        _count(None if evaluations is None else evaluations * STEPS_PER_EVALUATION)
        for evaluations in paper.evaluations_below
    ]
    return [f"{own} ({theirs})" for own, theirs in zip(ours, published, strict=True)]


def _count(steps: float | None) -> str:
    return NOT_REACHED if steps is None else f"{steps:,.0f}"


def _mad(study: Study, label: str, column: str) -> str:
    """Return a MAD score in percent. ``column`` is a task or AVERAGE."""
    ours = study.mad.score(label, column)
    published = published_value(PAPER_LABEL.get(label, label), column)
    shown = MISSING if ours is None else f"{100 * ours:.1f}"
    return shown if published is None else f"{shown} ({published:.1f})"
