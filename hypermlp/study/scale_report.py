"""Reports of the scaling study: tables, fitted lines, a page and a figure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hypermlp.jobs.cells import finite_fields
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.figures import new_figure, save
from hypermlp.reporting.page import render
from hypermlp.reporting.table import Table
from hypermlp.study.figures import row_name
from hypermlp.study.intervals import Interval, paired_effects, show_interval, t975
from hypermlp.study.scale import Measured, Point, extrapolated_rate

TEMPLATE = Path(__file__).parent / "scale.html"
AXES = {"parameters": "parameters", "training_flops": "training FLOPs"}
REFERENCE = "G-cg-q-12o"


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


def lines(found: list[Measured], axis: str) -> dict[str, Line]:
    """Return the fitted line of each row's losses, one value for each seed, against an axis of AXES."""
    rows = dict.fromkeys(each.row for each in found)
    fits = {
        row: fitted(
            [
                (getattr(each, axis), loss)
                for each in found
                if each.row == row
                for loss in each.losses.values()
            ]
        )
        for row in rows
    }
    return {row: line for row, line in fits.items() if line is not None}


def _differences(found: list[Measured], each: Measured) -> list[float]:
    """Return the losses of a row minus those of the reference row at the same size, seed by seed."""
    base = next((other.losses for other in found if other.point == each.point and other.row == REFERENCE), {})
    return [loss - base[seed] for seed, loss in each.losses.items() if seed in base]


def points_table(found: list[Measured], points: list[Point]) -> Table:
    """Return a line for each row and size; what is not recorded is shown as missing."""
    known = {(each.point.name, each.row): each for each in found}
    result = []
    for point in points:
        for row in point.size.rows:
            each = known.get((point.name, row))
            line = [row, point.name, "missing" if each is None or each.rate is None else f"{each.rate:g}"]
            if each is None or not each.losses:
                result.append(line + ["missing"] * 5)
                continue
            (mean,), (gap,) = (
                paired_effects([list(each.losses.values())]),
                paired_effects([_differences(found, each)]),
            )
            seeds = f"{len(each.losses)} of {len(point.size.seeds)}"
            costs = [f"{each.parameters:,}", f"{each.training_flops:.3g}"]
            difference = "reference" if row == REFERENCE else show_interval(gap, "+")
            result.append([*line, *costs, seeds, show_interval(mean), difference])
    titles = [
        "row",
        "size",
        "learning rate",
        "parameters",
        "training FLOPs",
        "seeds",
        "loss",
        f"loss minus {REFERENCE}",
    ]
    return Table(titles, result)


def fits_table(found: list[Measured]) -> Table:
    """Return the slopes of the fitted lines, and of the difference from the reference row."""
    rows = list(dict.fromkeys(each.row for each in found))
    slopes = {axis: lines(found, axis) for axis in AXES}
    result = []
    for row in rows:
        gaps = [
            (each.parameters, gap) for each in found if each.row == row for gap in _differences(found, each)
        ]
        gap_line = None if row == REFERENCE else fitted(gaps)
        shown = [
            show_interval(slopes[axis][row].slope if row in slopes[axis] else None, "+") for axis in AXES
        ]
        last = "reference" if row == REFERENCE else show_interval(gap_line.slope if gap_line else None, "+")
        result.append([row, *shown, last])
    per = "loss per tenfold"
    titles = [
        "row",
        *(f"{per} {name}" for name in AXES.values()),
        f"loss minus {REFERENCE} per tenfold parameters",
    ]
    return Table(titles, result)


def rates_table(found: list[Measured]) -> Table:
    """Return the rate of each row and size, and the rate that smaller sizes extrapolate to."""
    result = []
    for each in found:
        predicted = extrapolated_rate(found, each.row, each.point)
        cost = "missing"
        if predicted in each.tuning and each.rate in each.tuning:
            cost = f"{each.tuning[predicted] - each.tuning[each.rate]:+.3f}"
        elif predicted is None:
            cost = ""
        rate = "missing" if each.rate is None else f"{each.rate:g}"
        kind = "tuned" if each.point.tuned else "extrapolated"
        shown = "" if predicted is None else f"{predicted:g}"
        result.append([each.row, each.point.name, rate, kind, shown, cost])
    titles = ["row", "size", "learning rate", "how", "extrapolated", "loss lost by it on the tuning seed"]
    return Table(titles, result, left=frozenset(["how"]))


def markdown(found: list[Measured], points: list[Point]) -> str:
    """Return the report in Markdown."""
    tables = (points_table(found, points), fits_table(found), rates_table(found))
    return "\n\n".join(table.markdown() for table in tables) + "\n"


def summary(found: list[Measured]) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "points": [
            {
                "size": each.point.name,
                "row": each.row,
                "learning_rate": each.rate,
                "parameters": each.parameters,
                "training_flops": each.training_flops,
                "losses": each.losses,
            }
            for each in found
            if each.losses
        ],
        "slopes": {
            axis: {row: finite_fields(line.slope) for row, line in lines(found, axis).items()}
            for axis in AXES
        },
    }


def page(found: list[Measured], points: list[Point], title: str) -> str:
    """Return the report as a web page."""
    rows = list(dict.fromkeys(each.row for each in found))
    colours = {row: f"c{index}" for index, row in enumerate(rows)}
    charts = {name: _chart(found, axis, colours) for axis, name in AXES.items()}
    return render(
        TEMPLATE,
        title=title,
        colours={row_name(row): colour for row, colour in colours.items()},
        charts={name: chart for name, chart in charts.items() if chart},
        points=points_table(found, points),
        fits=fits_table(found),
        rates=rates_table(found),
        reference=REFERENCE,
    )


def _chart(found: list[Measured], axis: str, colours: dict[str, str]) -> str | None:
    series = []
    for row, colour in colours.items():
        own = sorted(
            (getattr(each, axis), fmean(each.losses.values()))
            for each in found
            if each.row == row and each.losses
        )
        tip = "\n".join([row_name(row), *(f"{x:.3g}: {loss:.3f}" for x, loss in own)])
        series += [Series([(math.log10(x), loss) for x, loss in own], colour, tip)] if own else []
    return line_chart(series, x=f"log10 of the {AXES[axis]}", y="validation loss") if series else None


def write_figure(found: list[Measured], path: Path) -> Iterator[Path]:
    """Draw loss against parameters and against training FLOPs; yield the paths of the figure.

    Dots are means over seeds with their 95 % intervals; lines are fitted, with the interval of the mean.
    """
    figure = new_figure(7.2, 3.2)
    for axes, (axis, name) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        fits = lines(found, axis)
        for index, row in enumerate(dict.fromkeys(each.row for each in found)):
            own = [each for each in found if each.row == row and each.losses]
            if not own:
                continue
            xs = [getattr(each, axis) for each in own]
            effects = [
                effect for each in own for effect in paired_effects([list(each.losses.values())]) if effect
            ]
            halves = [effect.high - effect.value if math.isfinite(effect.high) else 0.0 for effect in effects]
            axes.errorbar(
                xs,
                [effect.value for effect in effects],
                halves,
                fmt="o",
                color=f"C{index}",
                markersize=4,
                capsize=2,
            )
            if row in fits:
                grid = np.geomspace(min(xs), max(xs), 40)
                drawn = [fits[row].at(x) for x in grid]
                axes.plot(
                    grid,
                    [each.value for each in drawn],
                    color=f"C{index}",
                    linewidth=1.1,
                    label=row_name(row),
                )
                lows, highs = [each.low for each in drawn], [each.high for each in drawn]
                axes.fill_between(grid, lows, highs, color=f"C{index}", alpha=0.12, linewidth=0)
        axes.set(xscale="log", xlabel=name)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("validation loss")
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(frameon=False)
    yield from save(figure, path.parent, path.name)
