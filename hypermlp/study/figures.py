"""Figures of a study as PNG and SVG, for documents."""

from collections.abc import Iterator
from pathlib import Path

from hypermlp.errors import UserError
from hypermlp.inspect.figures import new_figure, save
from hypermlp.study.summary import Study

NAMES = {"G-cg-q-12o": "HyperGLU (G-cg-q-12o)", "R-cg-q-12o": "HyperMLP (R-cg-q-12o)"}


def row_name(label: str) -> str:
    """Return the name of a row in a figure."""
    return NAMES.get(label, label)


def write_curves(study: Study, path: Path) -> Iterator[Path]:
    """Draw the validation loss of every row against the step; yield the paths of the figure.

    A line is the mean over the seeds, and the shaded area reaches from the lowest to the highest seed.
    """
    if not study.rows:
        raise UserError("no row has a reported seed yet, so there are no curves to draw")
    figure = new_figure(5.6, 3.6)
    axes = figure.add_subplot()
    for label, row in sorted(study.rows.items(), key=lambda item: item[1].loss):
        steps, losses = zip(*row.curve, strict=True)
        rate = "" if row.rate is None else f", rate {row.rate:g}"
        (line,) = axes.plot(steps, losses, linewidth=1.2, label=f"{row_name(label)}{rate}: {row.loss:.3f}")
        seeds = [[loss for _, loss in curve] for curve in row.curves.values()]
        lowest, highest = (list(map(end, zip(*seeds, strict=True))) for end in (min, max))
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
    lowest_loss = min(row.loss for row in study.rows.values())
    axes.set(xlabel="step", ylabel="validation loss", ylim=(lowest_loss - 0.05, lowest_loss + 1.2))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    yield from save(figure, path.parent, path.name)
