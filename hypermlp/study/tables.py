"""Tables of a study. A value that the study should have and that no record gives is shown as missing."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from hypermlp.label import PAPER_ROWS
from hypermlp.mad.report import AVERAGE
from hypermlp.paper.variants import LOSS_THRESHOLDS, STEPS_PER_EVALUATION
from hypermlp.reporting.table import Columns, Table
from hypermlp.study.claims import Verdict, pair_name
from hypermlp.study.intervals import Interval, mean_interval, paired, show_interval
from hypermlp.study.reading import PAPER_LABEL, Row, Study
from hypermlp.study.thresholds import FRACTIONS, THRESHOLD_ROW, steps_to
from hypermlp.study.tuning import loss_of, show_loss

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
LOSS, PRIMARY = "loss", ("loss", "bits per byte")  # columns whose differences are shown
EFFECTS = "effect, 95 % interval"
# (the convolutions that both rows have, softmax attention, HyperGLU)
EQUAL_CONVOLUTIONS = (
    ("none", "S-p", "G-g-q-12o"),
    ("HyperGLU's own", "S-pc", "G-cg-q-12o"),
    ("Canon layers", "S-p+canon", "G-g-q-12o+canon"),
)
NAMES = {"G-cg-q-12o": "HyperGLU (G-cg-q-12o)", "R-cg-q-12o": "HyperMLP (R-cg-q-12o)"}
Column = tuple[str, Callable[[str], str]]
"""Title of a column, and the function that returns its cell for a label."""


def row_name(label: str) -> str:
    """Return the name of a row in charts and figures."""
    return NAMES.get(label, label)


def _table(columns: list[Column], labels: Iterable[str]) -> Table:
    return Table([title for title, _ in columns], [[cell(label) for _, cell in columns] for label in labels])


def _of_row(study: Study, show: Callable[[Row], str]) -> Callable[[str], str]:
    """Return the cells of a column that rows without a loss do not have."""
    return lambda label: show(study.rows[label]) if label in study.rows else MISSING


def _rate(row: Row) -> str:
    return "" if row.rate is None else f"{row.rate:g}"


def _parameters(row: Row) -> str:
    return f"{row.parameters:,}"


def _seeds(row: Row) -> str:
    return f"{len(row.losses)} ({row.diverged} diverged)" if row.diverged else f"{len(row.losses)}"


def study_table(study: Study) -> Table:
    """Return a line for each row that the study should have, with the paper's values in brackets.

    For the paper's rows at a size with MAD, these are all columns of the paper's Table 1.
    """

    def loss(label: str) -> str:
        ours = f"{study.rows[label].loss:.3f}" if label in study.rows else MISSING
        paper = PAPER_ROWS.get(PAPER_LABEL.get(label, label))
        return ours if paper is None else f"{ours} ({paper.loss:.3f})"

    def score(column: str) -> Column:
        return SHORT[column], lambda label: study.mad.cell(label, column, PAPER_LABEL.get(label), MISSING)

    columns: list[Column] = [
        ("label", lambda label: f"{label} (for {PAPER_LABEL[label]})" if label in PAPER_LABEL else label),
        *([("learning rate", _of_row(study, _rate))] if study.size.rates else []),
        ("parameters", _of_row(study, _parameters)),
        ("MFLOPs/token", _of_row(study, lambda row: f"{row.forward_flops_per_token / 1e6:.2f}")),
        ("seeds", _of_row(study, _seeds)),
        ("loss (paper)", loss),
        *(_threshold_columns(study) if THRESHOLD_ROW in study.labels else []),
        *(score(column) for column in ([*study.size.tasks, AVERAGE] if study.size.mad else [])),
    ]
    return _table(columns, study.labels)


def _threshold_columns(study: Study) -> list[Column]:
    """Return the steps of a row to the thresholds of our study, with the paper's steps to its own."""

    def count(steps: float | None) -> str:
        return NOT_REACHED if steps is None else f"{steps:,.0f}"

    def column(place: int, threshold: float | None) -> Column:
        def cell(label: str) -> str:
            ours, paper = MISSING, PAPER_ROWS.get(PAPER_LABEL.get(label, label))
            if label in study.rows and threshold is not None:
                ours = count(steps_to(study.rows[label].curve, threshold))
            if paper is None:
                return ours
            evaluations = paper.evaluations_below[place]
            published = count(None if evaluations is None else evaluations * STEPS_PER_EVALUATION)
            return f"{ours} ({published})"

        name = (
            f"{THRESHOLD_ROW}'s loss at {FRACTIONS[place]:.0%}" if threshold is None else f"{threshold:.3f}"
        )
        return f"steps to {name} ({LOSS_THRESHOLDS[place]})", cell

    return [column(*each) for each in enumerate(study.thresholds or [None] * len(FRACTIONS))]


def columns_of(study: Study, label: str) -> dict[str, dict[int, float]]:
    """Return the losses of a row and its columns of the suite ``local``, by seed; empty if it has none."""
    row = study.rows.get(label)
    return {} if row is None else {LOSS: row.losses, **row.scores}


def difference(study: Study, label: str, column: str = LOSS) -> Interval | None:
    """Return a column of a row minus that of the reference row, paired by seed, with its interval.

    The interval is Student's t over the seeds of the row alone: the rows are few and have several seeds, so
    each estimates its own variance.
    """
    ours, reference = (columns_of(study, each).get(column, {}) for each in (label, study.size.reference))
    return mean_interval(paired(ours, reference))


def contrast_table(study: Study) -> Table:
    """Return a line for every row that the study should have, with its differences from the reference row."""

    def mean(column: str) -> Column:
        def cell(label: str) -> str:
            return show_interval(mean_interval(columns_of(study, label).get(column, {}).values()))

        return column, cell

    def gap(column: str) -> Column:
        def cell(label: str) -> str:
            if label == study.size.reference and label in study.rows:
                return "reference"
            return show_interval(difference(study, label, column), "+")

        return f"difference in {column}", cell

    shown = dict.fromkeys(column for label in study.labels for column in columns_of(study, label)) or [LOSS]
    columns: list[Column] = [
        ("label", str),
        ("learning rate", _of_row(study, _rate)),
        ("parameters", _of_row(study, _parameters)),
        ("seeds", _of_row(study, lambda row: str(len(row.losses)))),
    ]
    for column in shown:
        columns += [mean(column), gap(column)] if column in PRIMARY else [mean(column)]
    return _table(columns, study.labels)


def convolution_table(study: Study) -> Table | None:
    """Return softmax attention against HyperGLU with equal convolutions, or None without such pairs.

    The losses are means over the seeds that both rows have. A study whose rows have unequal parameters, which
    therefore has no reference row, gets no table.
    """
    lines = []
    for convolutions, *labels in EQUAL_CONVOLUTIONS if study.size.reference else ():
        softmax, ours = (columns_of(study, label).get(LOSS, {}) for label in labels)
        common = softmax.keys() & ours.keys()
        if not common:
            continue
        means = [f"{fmean(losses[seed] for seed in sorted(common)):.3f}" for losses in (softmax, ours)]
        gap = show_interval(mean_interval(paired(softmax, ours)), "+")
        lines.append([convolutions, labels[0], means[0], labels[1], means[1], str(len(common)), gap])
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


def losses_table(results: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    """Return a line for each language model, the lowest loss first, from the cells' settings and results.

    A training that diverged has no loss and no costs.
    """
    rows = [settings | settings["recipe"]["training"] | result for settings, result in results]
    columns: Columns = [
        ("mixer", "{mixer}"),
        ("seed", "{seed}"),
        ("loss", lambda row: show_loss(loss_of(row), 4)),
        ("parameters", lambda row: "" if row["loss"] is None else f"{row['parameters']:,}"),
        (
            "MFLOPs/token",
            lambda row: "" if row["loss"] is None else f"{row['forward_flops_per_token'] / 1e6:.2f}",
        ),
    ]
    return Table.of(sorted(rows, key=loss_of), columns)


def rates_table(study: Study) -> Table | None:
    """Return the losses of the tuning seed by row and learning rate, the chosen rate in bold."""
    rows = {label: row for label, row in study.all_rows.items() if row.tuned}

    def column(rate: float) -> Column:
        def cell(label: str) -> str:
            loss, chosen = rows[label].tuning.get(rate), label in study.rows and rows[label].rate == rate
            shown = "" if loss is None else show_loss(loss)
            return f"**{shown}**" if chosen else shown

        return f"at {rate:g}", cell

    rates = sorted({rate for row in rows.values() for rate in row.tuned})
    return _table([("label", str), *map(column, rates)], rows) if rows else None


def agreement_table(study: Study) -> Table | None:
    """Return the rank correlations of our MAD columns with the paper's, or None without scores."""
    lines = [
        [SHORT[column], f"{rows}", show_interval(interval, digits=2)]
        for column, (rows, interval) in study.mad_correlations.items()
    ]
    return Table(["MAD column", "rows", "rank correlation with the paper"], lines) if lines else None


def claims_table(study: Study) -> Table | None:
    """Return a line for each claim, with its verdict and its effects; None if no claim can be judged."""
    lines = [[verdict.name, verdict.verdict, _effects(verdict)] for verdict in study.verdicts]
    return (
        Table(["claim", "verdict", EFFECTS], lines, left=frozenset(["verdict", EFFECTS])) if lines else None
    )


def _effects(verdict: Verdict) -> str:
    effects = [f"{each.name}: {show_interval(each.effect)}" for each in verdict.effects]
    missing = ", ".join(map(pair_name, verdict.missing))
    return "; ".join([*effects, f"missing: {missing}"] if missing else effects)
