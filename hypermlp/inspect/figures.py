"""Each panel of the page as PNG and SVG, for papers and slides: a grid of layers (down) and heads (across)."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.inspect.panels import BINS, Head, Panels, Routing, pre_activations
from hypermlp.reporting.records import write_bytes

FORMATS = ("png", "svg")
INCH = 2.4  # side of one small picture
GRID = 240  # points along a side of the routing map
LINE = 72  # characters of text in a row
DYNAMIC = (0.0, 1.0, 4.0)


def pyplot() -> Any:
    """Matplotlib, drawing into files alone."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib: pip install 'hypermlp[report]'") from error
    matplotlib.rcParams.update({"font.size": 8, "svg.hashsalt": "hypermlp", "svg.fonttype": "none"})
    return Figure


def save(figure: Any, folder: Path, name: str) -> Iterator[Path]:
    for kind in FORMATS:
        path, drawn = folder / f"{name}.{kind}", io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}  # the same bytes each time
        figure.savefig(drawn, format=kind, dpi=160, bbox_inches="tight", metadata=metadata)
        write_bytes(path, drawn.getvalue())
        yield path


def write_figures(found: Panels, folder: Path) -> Iterator[Path]:
    """All of them; those that a model has nothing for are left out."""
    selects = any(layer.activation != "softmax" for layer in found.layers)
    mixes = any(head.mixes for layer in found.layers for head in layer.heads)
    wanted: dict[str, tuple[Callable[[Panels], Any], bool]] = {
        "memory": (_memory, True),
        "activation": (lambda found: _maps(found, "activation", "slot"), True),
        "contribution": (lambda found: _maps(found, "contribution", "token"), True),
        "growth": (_growth, selects),
        "kernels": (_kernels, mixes),
        "mix": (_effective, mixes),
        "gates": (_gates, any(layer.gates for layer in found.layers)),
        "routing": (_routing, selects),
    }
    for name, (draw, present) in wanted.items():
        if present:
            yield from save(draw(found), folder, name)


def _grid(rows: int, columns: int, **settings: Any) -> tuple[Any, Any]:
    figure = pyplot()(figsize=(INCH * columns + 0.6, INCH * rows + 0.4), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def _over_heads(found: Panels, draw: Callable[[Any, Head], Any], **settings: Any) -> Any:
    heads = max(len(layer.heads) for layer in found.layers)
    figure, axes = _grid(len(found.layers), heads, **settings)
    for row, layer in zip(axes, found.layers, strict=True):
        for number, axis in enumerate(row, 1):
            draw(axis, layer.heads[number - 1])
            axis.set_title(f"layer {layer.index + 1}, head {number}")
    return figure


def shade(values: Tensor) -> Any:
    """As the page has it: the square root shows what is faint."""
    return values.float().abs().sqrt().cpu().numpy()


def _maps(found: Panels, which: str, across: str) -> Any:
    def draw(axis: Any, head: Head) -> None:
        axis.imshow(shade(getattr(head, which)), cmap="Greys", interpolation="nearest")
        axis.set_xlabel(across)
        axis.set_ylabel("step")

    return _over_heads(found, draw)


def _memory(found: Panels) -> Any:
    """The text, each token as dark as it contributes to the last step, in the first layer's first head."""
    share = shade(found.layers[0].heads[0].contribution[-1])
    share = share / (share.max() or 1)
    lines: list[list[tuple[str, float]]] = [[]]  # letters, each as dark as its token
    for token, dark in zip(found.tokens[found.registers :], share[found.registers :], strict=True):
        for letter in token:
            if letter == "\n" or len(lines[-1]) == LINE:
                lines.append([])
            if letter != "\n":
                lines[-1].append(
                    (letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}", float(dark))
                )
    figure = pyplot()(figsize=(7, 0.2 * len(lines) + 0.2))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, LINE), ylim=(len(lines), 0))
    axis.axis("off")
    for row, line in enumerate(lines):
        for place, (letter, dark) in enumerate(line):
            axis.add_patch(_box(place, row, 0.9 * dark))
            axis.text(place + 0.5, row + 0.7, letter, ha="center", family="monospace", parse_math=False)
    return figure


def _box(x: float, y: float, dark: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 1, 0.95, color=(0.76, 0.34, 0.1, dark), linewidth=0)


def _growth(found: Panels) -> Any:
    figure, axes = _grid(1, 2)
    axis = axes[0, 0]
    for layer in found.layers:
        if layer.activation == "softmax":
            continue
        for number, head in enumerate(layer.heads, 1):
            axis.plot(
                head.active.sum(-1).cpu().numpy(),
                linewidth=0.8,
                label=f"layer {layer.index + 1}, head {number}",
            )
    axis.plot(range(1, len(found.tokens) + 1), color="black", linewidth=0.8, label="all slots")
    axis.set(xlabel="step", ylabel="active slots")
    axes[0, 1].axis("off")
    axes[0, 1].legend(*axis.get_legend_handles_labels(), loc="center left", frameon=False)
    return figure


def _kernels(found: Panels) -> Any:
    def draw(axis: Any, head: Head) -> None:
        if not head.mixes:
            return axis.axis("off")
        mix = head.mixes[0]
        slots = range(1, len(mix.diag) + 1)
        axis.plot(slots, mix.left.float().cpu().numpy(), color="tab:orange", linewidth=0.4, alpha=0.7)
        axis.plot(slots, mix.right.float().cpu().numpy(), color="tab:blue", linewidth=0.4, alpha=0.7)
        axis.plot(slots, mix.diag.float().cpu().numpy(), color="black", linewidth=1.2)
        axis.set(xscale="log", xlabel=f"slot + 1 ({mix.name})")

    figure = _over_heads(found, draw)
    figure.supxlabel("A orange, B blue, p black", fontsize=8)
    return figure


def _effective(found: Panels) -> Any:
    def draw(axis: Any, head: Head) -> None:
        if not head.mixes:
            return axis.axis("off")
        mix = head.mixes[0]
        added = torch.diag(mix.diag) + mix.left * mix.gate[-1] @ mix.right.T
        most = float(added.abs().max()) or 1.0
        axis.imshow(
            added.float().cpu().numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest"
        )
        axis.set_xlabel(f"{mix.name.split(',')[0]} − I at the last step")

    return _over_heads(found, draw)


def _gates(found: Panels) -> Any:
    names = list(dict.fromkeys(name for layer in found.layers for name in layer.gates))
    figure, axes = _grid(len(found.layers), len(names))
    edges = [(i + 0.5) / BINS for i in range(BINS)]
    for row, layer in zip(axes, found.layers, strict=True):
        for axis, name in zip(row, names, strict=True):
            if name in layer.gates:
                axis.bar(edges, layer.gates[name].cpu().numpy(), width=1 / BINS, color="tab:orange")
            axis.set(title=f"layer {layer.index + 1}, gates: {name}", xlim=(0, 1))
    return figure


def _routing(found: Panels) -> Any:
    """Of each layer's first head, at several strengths of dynamic mixing."""
    layers = [layer for layer in found.layers if layer.activation != "softmax"]
    figure, axes = _grid(len(layers), len(DYNAMIC))
    for row, layer in zip(axes, layers, strict=True):
        routing = layer.heads[0].routing
        assert routing is not None
        for axis, dynamic in zip(row, DYNAMIC, strict=True):
            draw_routing(axis, routing, dynamic)
            said = {0.0: "gates held still", 1.0: "as it is"}.get(
                dynamic, f"gates {dynamic:g} times as lively"
            )
            axis.set_title(f"layer {layer.index + 1}: {said}")
    return figure


def draw_routing(axis: Any, routing: Routing, dynamic: float) -> None:
    side = torch.linspace(-1, 1, GRID, dtype=routing.query.dtype, device=routing.query.device)
    where = torch.cartesian_prod(side, side).flip(1)  # rows of b, columns of a
    h = pre_activations(routing, where, dynamic).view(GRID, GRID, -1).float().cpu()
    at = side.float().cpu().numpy()
    axis.imshow((h > 0).sum(-1).numpy(), cmap="Oranges", alpha=0.6, extent=(-1, 1, -1, 1), origin="lower")
    for slot in range(h.shape[-1]):
        field = h[:, :, slot]
        if (field > 0).any() and (field <= 0).any():
            axis.contour(at, at, field.numpy(), levels=[0], colors="black", linewidths=0.5)
    axis.plot([0], [0], "k.", markersize=5)
    axis.set(xticks=[], yticks=[])
