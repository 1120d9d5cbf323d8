"""Curves of the loss by position, for pages and documents."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hypermlp.errors import UserError
from hypermlp.label import PAPER_NAMES
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.figures import new_figure, save
from hypermlp.reporting.page import COLOURS

SHORT_NAMES = {label: name for name, label in PAPER_NAMES.items()}
STYLES = ("-", "--", ":", "-.")
HIGHEST = 1.3  # above the lowest loss: curves that rise further leave the figure


class CurveOfSeeds(NamedTuple):
    """The losses of one model and variant, for all its seeds."""

    name: str
    model: str
    positions: list[float]
    """The middle of each bucket, on a logarithmic scale."""
    losses: list[list[float]]
    """One list for each seed."""

    @property
    def mean(self) -> list[float]:
        return [float(loss) for loss in np.mean(self.losses, axis=0)]


def curves_of(rows: list[dict[str, Any]]) -> list[CurveOfSeeds]:
    """Return a curve for each model and variant; rows that differ in their seed alone share one."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["mixer"], row["variant"], row["trained_context"]].append(row)
    shortest = min(row["trained_context"] for row in rows)
    curves = []
    for (mixer, variant, context), group in groups.items():
        model = SHORT_NAMES.get(mixer, mixer)
        name = f"{model}{', ' * bool(variant)}{variant}"
        name += f", then trained at {context:,}" if context != shortest else ""
        name += f" ({len(group)} seeds)" if len(group) > 1 else ""
        edges = [max(1, edge) for edge in group[0]["edges"]]
        middles = [(low * high) ** 0.5 for low, high in itertools.pairwise(edges)]
        curves.append(CurveOfSeeds(name, model, middles, [row["loss"] for row in group]))
    return curves


def position_chart(rows: list[dict[str, Any]]) -> str:
    """Return the curves as SVG for a page."""
    series = [
        Series(
            list(zip(curve.positions, curve.mean, strict=True)),
            f"c{index % COLOURS}",
            f"{curve.name}\n{curve.mean[-1]:.3f} at the last positions",
        )
        for index, curve in enumerate(curves_of(rows))
    ]
    return line_chart(series, x="position", y="loss", logarithmic=True)


def write_position_figure(rows: list[dict[str, Any]], path: Path) -> Iterator[Path]:
    """Draw the curves as PNG and SVG; yield the paths.

    A line is the mean over the seeds, and the shaded area reaches from the lowest to the highest seed. The
    grey line is the shortest trained context.
    """
    if not rows:
        raise UserError("there is no loss by position to draw; give records of `hypermlp eval --by-position`")
    figure = new_figure(7.2, 3.6)
    axes = figure.add_subplot()
    curves = curves_of(rows)
    models = list(dict.fromkeys(curve.model for curve in curves))
    for index, curve in enumerate(curves):
        style = STYLES[models.index(curve.model) % len(STYLES)]
        name = f"{curve.name}: {curve.mean[-1]:.2f}"
        colour = f"C{index % 10}"
        axes.plot(curve.positions, curve.mean, style, color=colour, linewidth=1.3, label=name)
        if len(curve.losses) > 1:
            low, high = np.min(curve.losses, axis=0), np.max(curve.losses, axis=0)
            axes.fill_between(curve.positions, low, high, color=colour, alpha=0.15, linewidth=0)
    context = min(row["trained_context"] for row in rows)
    axes.axvline(context, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = [context * 2.0**power for power in range(-3, 12)]
    last = max(row["edges"][-1] for row in rows)
    shown = [tick for tick in ticks if tick <= last]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    lowest = min(min(curve.mean) for curve in curves)
    axes.set(
        xlabel="position", ylabel="loss", xlim=(context / 4, last), ylim=(lowest - 0.05, lowest + HIGHEST)
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    yield from save(figure, path.parent, path.name)
