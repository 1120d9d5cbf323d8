"""Compare the rows of a study with one of them, seed by seed."""

from dataclasses import dataclass

from hypermlp.reporting.table import Table
from hypermlp.study.intervals import Interval, paired_effects, show_interval
from hypermlp.study.summary import Study
from hypermlp.study.tables import MISSING

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
