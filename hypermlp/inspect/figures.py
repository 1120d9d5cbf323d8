"""Each panel of the page as PNG and SVG, for papers: a grid of layers (rows) and heads (columns)."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp.inspect.panels import BINS, Head, Layer, Panels, Routing, pre_activations
from hypermlp.layers.internals import Kernels
from hypermlp.reporting.figures import new_figure, save

INCH = 2.4  # side of one small picture
GRID = 240  # points along a side of the routing map
LINE = 72  # characters of text in a row
DYNAMIC = {0.0: "gates held still", 1.0: "as it is", 4.0: "gates 4 times as lively"}


def write_figures(panels: Panels, folder: Path) -> Iterator[Path]:
    """Write every figure that the model has numbers for and yield the paths."""
    selects = any(layer.selects for layer in panels.layers)
    mixes = any(head.mixes for layer in panels.layers for head in layer.heads)
    drawings: dict[str, tuple[Callable[[Panels], Any], bool]] = {
        "memory": (_memory, True),
        "activation": (lambda panels: _maps(panels, "activation", "slot"), True),
        "contribution": (lambda panels: _maps(panels, "contribution", "token"), True),
        "growth": (_growth, selects),
        "kernels": (_kernels, mixes),
        "mix": (_effective, mixes),
        "gates": (_gates, any(layer.gates for layer in panels.layers)),
        "routing": (_routing, selects),
    }
    for name, (draw, present) in drawings.items():
        if present:
            yield from save(draw(panels), folder, name)


def array(values: Tensor) -> Any:
    return values.float().cpu().numpy()


def shade(values: Tensor) -> Any:
    """Return the square root, which keeps small values visible, as on the page."""
    return array(values.float().abs().sqrt())


def signed_image(axis: Any, values: Tensor, most: float = 0.0) -> None:
    """Draw a matrix in blue and red, white at zero; the scale ends at ``most``, or at the largest entry."""
    most = most or float(values.abs().max()) or 1.0
    axis.imshow(array(values), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")


def _grid(rows: int, columns: int) -> tuple[Any, Any]:
    figure = new_figure(INCH * columns + 0.6, INCH * rows + 0.4)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _cells(rows: Sequence[Any], columns: Sequence[Any], draw: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a figure in which ``draw(axis, row, column)`` has drawn every cell."""
    figure, axes = _grid(len(rows), len(columns))
    for axis, (row, column) in zip(axes.flat, itertools.product(rows, columns), strict=True):
        draw(axis, row, column)
    return figure


def _over_heads(panels: Panels, draw: Callable[[Any, Head], Any]) -> Any:
    def cell(axis: Any, layer: Layer, number: int) -> None:
        draw(axis, layer.heads[number - 1])
        axis.set_title(f"layer {layer.index + 1}, head {number}")

    return _cells(panels.layers, range(1, len(panels.layers[0].heads) + 1), cell)


def _over_first_mixes(panels: Panels, draw: Callable[[Any, str, Kernels], Any]) -> Any:
    """Draw the first mix of every head, by its name; heads without mixes stay empty."""

    def cell(axis: Any, head: Head) -> None:
        if head.mixes:
            draw(axis, *next(iter(head.mixes.items())))
        else:
            axis.axis("off")

    return _over_heads(panels, cell)


def _maps(panels: Panels, which: str, across: str) -> Any:
    def draw(axis: Any, head: Head) -> None:
        axis.imshow(shade(getattr(head, which)), cmap="Greys", interpolation="nearest")
        axis.set(xlabel=across, ylabel="step")

    return _over_heads(panels, draw)


def _memory(panels: Panels) -> Any:
    """Draw the text; a darker token contributes more to the last step in the first layer's first head."""
    from matplotlib.patches import Rectangle

    share = shade(panels.layers[0].heads[0].contribution[-1])
    share = share / (share.max() or 1)
    lines: list[list[tuple[str, float]]] = [[]]  # letters, each as dark as its token
    for token, dark in zip(panels.tokens[panels.registers :], share[panels.registers :], strict=True):
        for letter in token:
            if letter == "\n" or len(lines[-1]) == LINE:
                lines.append([])
            if letter != "\n":
                shown = letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
                lines[-1].append((shown, float(dark)))
    figure = new_figure(7, 0.2 * len(lines) + 0.2, layout="none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, LINE), ylim=(len(lines), 0))
    axis.axis("off")
    for row, line in enumerate(lines):
        for place, (letter, dark) in enumerate(line):
            axis.add_patch(Rectangle((place, row), 1, 0.95, color=(0.76, 0.34, 0.1, 0.9 * dark), linewidth=0))
            axis.text(place + 0.5, row + 0.7, letter, ha="center", family="monospace", parse_math=False)
    return figure


def _growth(panels: Panels) -> Any:
    figure, ((axis, legend),) = _grid(1, 2)
    for layer in filter(lambda layer: layer.selects, panels.layers):
        for number, head in enumerate(layer.heads, 1):
            name = f"layer {layer.index + 1}, head {number}"
            axis.plot(array(head.active.sum(-1)), linewidth=0.8, label=name)
    axis.plot(range(1, len(panels.tokens) + 1), color="black", linewidth=0.8, label="all slots")
    axis.set(xlabel="step", ylabel="active slots")
    legend.axis("off")
    legend.legend(*axis.get_legend_handles_labels(), loc="center left", frameon=False)
    return figure


def _kernels(panels: Panels) -> Any:
    def draw(axis: Any, name: str, mix: Kernels) -> None:
        slots = range(1, len(mix.diag) + 1)
        for values, colour in ((mix.left, "tab:orange"), (mix.right, "tab:blue")):
            axis.plot(slots, array(values), color=colour, linewidth=0.4, alpha=0.7)
        axis.plot(slots, array(mix.diag), color="black", linewidth=1.2)
        axis.set(xscale="log", xlabel=f"slot + 1 ({name})")

    figure = _over_first_mixes(panels, draw)
    figure.supxlabel("A orange, B blue, p black", fontsize=8)
    return figure


def _effective(panels: Panels) -> Any:
    def draw(axis: Any, name: str, mix: Kernels) -> None:
        signed_image(axis, mix.added(-1))
        axis.set_xlabel(f"{name.split(',')[0]} − I at the last step")

    return _over_first_mixes(panels, draw)


def _gates(panels: Panels) -> Any:
    centres = [(i + 0.5) / BINS for i in range(BINS)]

    def draw(axis: Any, layer: Layer, name: str) -> None:
        if name in layer.gates:
            axis.bar(centres, array(layer.gates[name]), width=1 / BINS, color="tab:orange")
        axis.set(title=f"layer {layer.index + 1}, gates: {name}", xlim=(0, 1))

    names = dict.fromkeys(name for layer in panels.layers for name in layer.gates)
    return _cells(panels.layers, list(names), draw)


def _routing(panels: Panels) -> Any:
    """Draw the routing of each layer's first head at several strengths of dynamic mixing."""

    def draw(axis: Any, layer: Layer, dynamic: float) -> None:
        routing = layer.heads[0].routing
        assert routing is not None
        draw_routing(axis, routing, dynamic)
        axis.set_title(f"layer {layer.index + 1}: {DYNAMIC[dynamic]}")

    return _cells([layer for layer in panels.layers if layer.selects], list(DYNAMIC), draw)


def draw_routing(axis: Any, routing: Routing, dynamic: float) -> None:
    """Draw the number of active slots on the plane, and a line where each slot switches."""
    side = torch.linspace(-1, 1, GRID, dtype=routing.query.dtype, device=routing.query.device)
    where = torch.cartesian_prod(side, side).flip(1)  # rows of b, columns of a
    h = pre_activations(routing, where, dynamic).view(GRID, GRID, -1)
    axis.imshow(array((h > 0).sum(-1)), cmap="Oranges", alpha=0.6, extent=(-1, 1, -1, 1), origin="lower")
    for slot in h.unbind(-1):
        if (slot > 0).any() and (slot <= 0).any():
            axis.contour(array(side), array(side), array(slot), levels=[0], colors="black", linewidths=0.5)
    axis.plot([0], [0], "k.", markersize=5)
    axis.set(xticks=[], yticks=[])
