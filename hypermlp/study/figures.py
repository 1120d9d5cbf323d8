"""Figures of a study as PNG and SVG, for documents."""

from collections.abc import Iterator
from pathlib import Path

from hypermlp.errors import UserError
from hypermlp.reporting.figures import new_figure, save
from hypermlp.study.protocol import HEADLINE_ROWS
from hypermlp.study.summary import Study

COLOURS = 8
NAMES = {"G-cg-q-12o": "HyperGLU (G-cg-q-12o)", "R-cg-q-12o": "HyperMLP (R-cg-q-12o)"}


def row_name(label: str) -> str:
    """Return the name of a row in a figure."""
    return NAMES.get(label, label)


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
