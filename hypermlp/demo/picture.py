"""The learning curves of the demonstration as one picture."""

from pathlib import Path

from hypermlp.reporting.figures import new_figure
from hypermlp.reporting.sources import Curve

COLOURS = ("#1b6ca8", "#d1603d", "#8a8a8a")


def draw(path: Path, recall: dict[str, Curve], language: dict[str, Curve]) -> Path:
    """Write the accuracies on recall and the losses of the language models, by name, as a PNG file."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    panels = (
        (left, recall, 100.0, "in-context recall", "accuracy on new sequences, percent"),
        (right, language, 1.0, "a language model on Python's source", "held-out loss, nats per byte"),
    )
    for axes, curves, scale, title, unit in panels:
        for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
            steps, values = [step for step, _ in curve], [scale * value for _, value in curve]
            axes.plot(steps, values, marker="o", markersize=3, color=colour, label=name)
        axes.set(title=title, xlabel="training steps", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
