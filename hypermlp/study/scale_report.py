"""Reports of the size study: tables, fitted lines, and a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from hypermlp.jobs.cells import finite_fields
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import Figure, Section, report_markdown, report_page
from hypermlp.reporting.table import Table
from hypermlp.study.intervals import Interval, mean_interval, paired, show_interval, t975
from hypermlp.study.reading import Row
from hypermlp.study.scale import SCALE_ROWS, Measured, extrapolated_rate
from hypermlp.study.tables import MISSING, difference, row_name

AXES = {"parameters": "parameters", "training_flops": "training FLOPs"}
REFERENCE = SCALE_ROWS[0]
ABOUT = (
    "Loss against size for a few mixers. All models of one size have the same number of parameters, by the "
    "width of the MLP, and see the same tokens in the same order; the number of tokens grows with the "
    "parameters. FLOPs are those of the whole training and count only pairs of positions that see each other."
)


@dataclass(frozen=True)
class Line:
    """``y = offset + slope * log10(x)``, fitted by least squares."""

    offset: float
    slope: Interval
    """Change of y per tenfold x, with its 95 % interval (Student's t)."""
    deviation: float
    """Standard deviation of the residuals."""
    xs: tuple[float, ...]
    """log10(x) of the values that were fitted."""

    def at(self, x: float) -> Interval:
        """Return the fitted mean at ``x`` with its 95 % interval."""
        place, middle = math.log10(x), fmean(self.xs)
        spread = sum((each - middle) ** 2 for each in self.xs)
        half = t975(len(self.xs) - 2) * self.deviation
        half *= math.sqrt(1 / len(self.xs) + (place - middle) ** 2 / spread)
        value = self.offset + self.slope.value * place
        return Interval(value, value - half, value + half)


def fitted(values: Sequence[tuple[float, float]]) -> Line | None:
    """Fit a line to (x, y); None with fewer than three values or fewer than two different x."""
    xs = [math.log10(x) for x, _ in values]
    if len(values) < 3 or len(set(xs)) < 2:
        return None
    ys = np.array([y for _, y in values])
    slope, offset = map(float, np.polyfit(xs, ys, 1))
    residuals = ys - offset - slope * np.array(xs)
    deviation = math.sqrt(float(residuals @ residuals) / (len(ys) - 2))
    half = t975(len(ys) - 2) * deviation / math.sqrt(sum((x - fmean(xs)) ** 2 for x in xs))
    return Line(offset, Interval(slope, slope - half, slope + half), deviation, tuple(xs))


def by_row(found: Measured) -> dict[str, list[Row]]:
    """Return the models of each row at all sizes at which it has a loss, the smallest first."""
    labels = dict.fromkeys(label for study in found.values() for label in study.rows)
    return {label: [study.rows[label] for study in found.values() if label in study.rows] for label in labels}


def lines(found: Measured, axis: str) -> dict[str, Line]:
    """Return the fitted line of each row's losses, one value for each seed, against an axis of AXES."""
    values = {
        label: [(getattr(row, axis), loss) for row in rows for loss in row.losses.values()]
        for label, rows in by_row(found).items()
    }
    return {label: line for label, points in values.items() if (line := fitted(points)) is not None}


def points_table(found: Measured) -> Table:
    """Return a line for each row and size; what is not recorded is shown as missing."""
    result = []
    for name, study in found.items():
        for label, row in study.all_rows.items():
            line = [label, name, MISSING if row.rate is None else f"{row.rate:g}"]
            if not row.losses:
                result.append(line + [MISSING] * 5)
                continue
            line += [f"{row.parameters:,}", f"{row.training_flops:.3g}"]
            line += [f"{len(row.losses)} of {len(study.size.seeds)}"]
            line += [show_interval(mean_interval(row.losses.values()))]
            gap = "reference" if label == REFERENCE else show_interval(difference(study, label), "+")
            result.append([*line, gap])
    titles = ["row", "size", "learning rate", "parameters", "training FLOPs", "seeds", "loss"]
    return Table([*titles, f"loss minus {REFERENCE}"], result)


def fits_table(found: Measured) -> Table:
    """Return the slopes of the fitted lines, and of the difference from the reference row."""
    slopes, result = [lines(found, axis) for axis in AXES], []

    def slope(line: Line | None) -> str:
        return show_interval(line.slope if line else None, "+")

    for label in by_row(found):
        gaps = [
            (study.rows[label].parameters, gap)
            for study in found.values()
            if {label, REFERENCE} <= study.rows.keys()
            for gap in paired(study.rows[label].losses, study.rows[REFERENCE].losses)
        ]
        last = "reference" if label == REFERENCE else slope(fitted(gaps))
        result.append([label, *(slope(fits.get(label)) for fits in slopes), last])
    titles = [f"loss per tenfold {name}" for name in AXES.values()]
    return Table(["row", *titles, f"loss minus {REFERENCE} per tenfold parameters"], result)


def rates_table(found: Measured) -> Table:
    """Return the rate of each row and size, and the rate that smaller sizes extrapolate to."""
    result = []
    for name, study in found.items():
        for label, row in study.all_rows.items():
            if not row.records:
                continue
            predicted, tuning = extrapolated_rate(found, label, study.size), row.tuning
            cost = "" if predicted is None else MISSING
            if predicted in tuning and row.rate in tuning:
                cost = f"{tuning[predicted] - tuning[row.rate]:+.3f}"
            shown = "" if predicted is None else f"{predicted:g}"
            rate = MISSING if row.rate is None else f"{row.rate:g}"
            how = "tuned" if study.size.rates else "extrapolated"
            result.append([label, name, rate, how, shown, cost])
    titles = ["row", "size", "learning rate", "how", "extrapolated", "loss lost by it on the tuning seed"]
    return Table(titles, result, left=frozenset(["how"]))


def _sections(found: Measured) -> list[Section]:
    return [
        Section(
            "All points",
            f"Means over the seeds, and differences from {REFERENCE} paired by seed, with 95 % intervals "
            f"(Student's t). A positive difference means that {REFERENCE} is better.",
            table=points_table(found),
        ),
        Section(
            "Fitted lines",
            "Loss = a + b log10(x), by least squares over all seeds; b with its 95 % interval. The last "
            f"column is the slope of the difference: negative if the lead of {REFERENCE} shrinks with size.",
            table=fits_table(found),
        ),
        Section(
            "Learning rates",
            "The rate of each size, and the rate that the smaller tuned sizes extrapolate to, where there "
            "are two of them.",
            table=rates_table(found),
        ),
    ]


def markdown(found: Measured) -> str:
    """Return the report in Markdown."""
    return report_markdown(_sections(found))


def page(found: Measured, title: str) -> str:
    """Return the report as a web page."""
    charts = [_chart(found, axis) for axis in AXES] if by_row(found) else []
    return report_page(title, [*charts, *_sections(found)], ABOUT)


def _chart(found: Measured, axis: str) -> Section:
    series, colours = [], {}
    for index, (label, rows) in enumerate(by_row(found).items()):
        colours[row_name(label)] = f"c{index}"
        places = sorted((getattr(row, axis), row.loss) for row in rows)
        tip = "\n".join([row_name(label), *(f"{x:.3g}: {loss:.3f}" for x, loss in places)])
        series.append(Series([(math.log10(x), loss) for x, loss in places], f"c{index}", tip))
    chart = line_chart(series, x=f"log10 of the {AXES[axis]}", y="validation loss")
    caption = "Means over the seeds. Point at a curve for details."
    return Section(f"Loss against {AXES[axis]}", figures=[Figure(chart, caption, colours)])


def summary(found: Measured) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "points": [
            {
                "size": name,
                "row": label,
                "learning_rate": row.rate,
                "parameters": row.parameters,
                "training_flops": row.training_flops,
                "losses": row.losses,
            }
            for name, study in found.items()
            for label, row in study.rows.items()
        ],
        "slopes": {
            axis: {row: finite_fields(line.slope) for row, line in lines(found, axis).items()}
            for axis in AXES
        },
    }
