"""Figures of studies as PNG and SVG, for documents."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hypermlp.errors import UserError
from hypermlp.reporting.figures import new_figure, save
from hypermlp.reporting.page import COLOURS
from hypermlp.study.intervals import Interval, mean_interval
from hypermlp.study.protocol import HEADLINE_ROWS
from hypermlp.study.reading import Study
from hypermlp.study.scale import Measured
from hypermlp.study.scale_report import AXES, by_row, lines
from hypermlp.study.tables import row_name


def write_curves(study: Study, path: Path) -> Iterator[Path]:
    """Draw the validation loss of every row against the step; yield the paths of the figure.

    A line is the mean over the seeds, and the shaded area reaches from the lowest to the highest seed. If
    there are more rows than colours, those of HEADLINE_ROWS have a colour, and the others are grey.
    """
    if not study.rows:
        raise UserError("no row has a reported seed yet, so there are no curves to draw")
    few = len(study.rows) <= COLOURS
    coloured = {label: row for label, row in study.rows.items() if few or label in HEADLINE_ROWS}
    figure = new_figure(5.6, 3.6)
    axes = figure.add_subplot()
    for label in study.rows.keys() - coloured.keys():
        axes.plot(*zip(*study.rows[label].curve, strict=True), color="0.8", linewidth=0.7, zorder=1)
    for label, row in sorted(coloured.items(), key=lambda item: item[1].loss):
        steps, losses = zip(*row.curve, strict=True)
        rate = "" if row.rate is None else f", rate {row.rate:g}"
        (line,) = axes.plot(steps, losses, linewidth=1.2, label=f"{row_name(label)}{rate}: {row.loss:.3f}")
        seeds = [[loss for _, loss in curve] for curve in row.curves.values()]
        lowest, highest = (list(map(end, zip(*seeds, strict=True))) for end in (min, max))
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
    lowest_loss = min(row.loss for row in study.rows.values())
    axes.set(
        xlabel="step", ylabel="validation loss, nats per token", ylim=(lowest_loss - 0.05, lowest_loss + 1.2)
    )
    axes.grid(alpha=0.3)
    if len(coloured) < len(study.rows):
        axes.plot([], [], color="0.8", label=f"the other {len(study.rows) - len(coloured)} rows")
    axes.legend(
        framealpha=0.9, edgecolor="none", fontsize=7, title="bands: lowest to highest seed", title_fontsize=7
    )
    yield from save(figure, path.parent, path.name)


def write_scaling(found: Measured, path: Path) -> Iterator[Path]:
    """Draw loss against parameters and against training FLOPs; yield the paths of the figure.

    Dots are means over seeds with their 95 % intervals; lines are fitted, with the interval of the mean.
    """
    figure = new_figure(7.2, 3.2)
    for axes, (axis, name) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        fits = lines(found, axis)
        for index, (label, rows) in enumerate(by_row(found).items()):
            colour, xs = f"C{index}", [getattr(row, axis) for row in rows]
            halves = [_half(mean_interval(row.losses.values())) for row in rows]
            losses = [row.loss for row in rows]
            axes.errorbar(xs, losses, halves, fmt="o", color=colour, markersize=4, capsize=2)
            if label in fits:
                grid = np.geomspace(min(xs), max(xs), 40)
                means, lows, highs = zip(*(fits[label].at(x) for x in grid), strict=True)
                axes.plot(grid, means, color=colour, linewidth=1.1, label=row_name(label))
                axes.fill_between(grid, lows, highs, color=colour, alpha=0.12, linewidth=0)
        axes.set(xscale="log", xlabel=name)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("validation loss")
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(frameon=False)
    yield from save(figure, path.parent, path.name)


def _half(interval: Interval | None) -> float:
    """Return half the width of an interval; 0 for an infinite one, as of a single seed."""
    width = 0.0 if interval is None else interval.high - interval.value
    return width if math.isfinite(width) else 0.0
