"""Compare the rows of a study with one of them, seed by seed."""

from dataclasses import dataclass
from statistics import fmean

from hypermlp.reporting.table import Table
from hypermlp.study.intervals import Interval, paired_effects, show_interval
from hypermlp.study.summary import Study
from hypermlp.study.tables import MISSING

# (the convolutions that both rows have, softmax attention, HyperGLU)
EQUAL_CONVOLUTIONS = (
    ("none", "S-p", "G-g-q-12o"),
    ("HyperGLU's own", "S-pc", "G-cg-q-12o"),
    ("Canon layers", "S-p+canon", "G-g-q-12o+canon"),
)
LOSS, PRIMARY = "loss", ("loss", "bits per byte")  # columns whose differences are shown


@dataclass(frozen=True)
class Contrast:
    """One row against the reference row."""

    label: str
    means: dict[str, Interval]
    """Means over the seeds by column: the loss, and the columns of the suite ``local``."""
    differences: dict[str, Interval]
    """The row minus the reference row, paired by seed. Empty for the reference row itself."""
    common: int
    """Seeds that both rows have."""


def contrasts(study: Study, reference: str) -> list[Contrast]:
    """Return a contrast for every row that has a loss.

    The intervals are Student's t over the seeds of the row alone: the rows are few and have several seeds,
    so each estimates its own variance.
    """
    base = _columns(study, reference)
    found = []
    for label in study.labels:
        own = _columns(study, label)
        if not own:
            continue
        others = base if label != reference else {}
        paired = {
            column: [
                own[column][seed] - others[column][seed] for seed in own[column] if seed in others[column]
            ]
            for column in own
            if column in others
        }
        means = {column: _interval(list(values.values())) for column, values in own.items()}
        differences = {column: _interval(values) for column, values in paired.items() if values}
        found.append(Contrast(label, means, differences, len(paired.get(LOSS, []))))
    return found


def convolution_table(study: Study) -> Table | None:
    """Return softmax attention against HyperGLU with equal convolutions, or None without such pairs.

    The losses are means over the seeds that both rows have. A study whose rows have unequal parameters, which
    therefore has no reference row, gets no table.
    """
    if not study.reference:
        return None
    lines = []
    for convolutions, softmax, ours in EQUAL_CONVOLUTIONS:
        first, second = (_columns(study, label).get(LOSS, {}) for label in (softmax, ours))
        common = sorted(first.keys() & second.keys())
        if not common:
            continue
        means = [f"{fmean(losses[seed] for seed in common):.3f}" for losses in (first, second)]
        difference = show_interval(_interval([first[seed] - second[seed] for seed in common]), "+")
        lines.append([convolutions, softmax, means[0], ours, means[1], str(len(common)), difference])
    titles = [
        "convolutions of both",
        "softmax",
        "its loss",
        "HyperGLU",
        "its loss",
        "seeds",
        "softmax minus HyperGLU",
    ]
    return Table(titles, lines, left=frozenset(["softmax", "HyperGLU"])) if len(lines) > 1 else None


def _columns(study: Study, label: str) -> dict[str, dict[int, float]]:
    """Return the values of a row by column and seed; empty if it has none."""
    row = study.rows.get(label)
    return {} if row is None else {LOSS: row.losses, **row.scores}


def _interval(values: list[float]) -> Interval:
    (found,) = paired_effects([values])
    assert found is not None
    return found


def contrast_table(study: Study, reference: str) -> Table:
    """Return a line for every row that the study should have, with its differences from the reference."""
    found = {each.label: each for each in contrasts(study, reference)}
    columns = list(dict.fromkeys(column for each in found.values() for column in each.means)) or [LOSS]
    titles = ["label", "learning rate", "parameters", "seeds"]
    for column in columns:
        titles += [column, f"difference in {column}"] if column in PRIMARY else [column]
    lines = []
    for label in study.labels:
        row, own = study.rows.get(label), found.get(label)
        if row is None or own is None:
            lines.append([label] + [MISSING] * (len(titles) - 1))
            continue
        line = [
            label,
            "" if row.rate is None else f"{row.rate:g}",
            f"{row.parameters:,}",
            str(len(row.losses)),
        ]
        for column in columns:
            line.append(show_interval(own.means.get(column)))
            if column in PRIMARY:
                line.append(
                    "reference" if label == reference else show_interval(own.differences.get(column), "+")
                )
        lines.append(line)
    return Table(titles, lines)
