"""The paper's concepts, drawn from the tensors of a real layer.

``python docs/figures/concepts.py`` writes the figures next to this file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp import HyperMLP
from hypermlp.inspect.capture import Capture, capture
from hypermlp.inspect.figures import signed_image
from hypermlp.layers.internals import kernels
from hypermlp.reporting.figures import new_figure, save

LENGTH, HIDDEN, STEP = 14, 20, 13


def example() -> Capture:
    """Capture a small layer whose parameters are large enough for its gates and kernels to be visible."""
    torch.manual_seed(3)
    layer = HyperMLP(HIDDEN, max_length=LENGTH, num_heads=1, rank=3, conv_kernel=1)
    layer.double().requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert layer.mix1 is not None
    lags = torch.arange(LENGTH, dtype=torch.float64)
    smooth = [torch.exp(-lags / 4), torch.cos(lags / 2), -torch.exp(-lags / 9)]  # like trained kernels
    for parameter in (layer.mix1.left, layer.mix1.right):
        parameter[0] = torch.stack(smooth, dim=1) * 0.5
    layer.mix1.diag[0] = 0.6 * torch.exp(-lags / 3)
    return capture(layer, torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64))


def draw_all(folder: Path) -> Iterator[Path]:
    """Write every figure and yield the paths."""
    seen = example()
    for name, draw in {
        "dynamic-mlp": _dynamic_mlp,
        "lag-layout": _lag_layout,
        "skewed-buffer": _skewed_buffer,
        "dplr": _dplr,
    }.items():
        yield from save(draw(seen), folder, name)


def _figure(width: float, height: float, caption: str) -> Any:
    figure = new_figure(width, height)
    figure.supxlabel(caption, fontsize=9)
    return figure


def _equation(parts: list[tuple[str, Tensor, str]], caption: str) -> Any:
    """Draw matrices in a row: each with its name, its shape and the sign that follows it."""
    widths = [max(part.shape[1], 4) for _, part, _ in parts]
    figure = _figure(9, 2.7, caption)
    axes = figure.subplots(1, len(parts), width_ratios=widths, squeeze=False)[0]
    for axis, (title, part, sign) in zip(axes, parts, strict=True):
        signed_image(axis, part)
        axis.set(title=title, xticks=[], yticks=[], xlabel=" × ".join(map(str, part.shape)))
        axis.text(1.08, 0.5, sign, transform=axis.transAxes, fontsize=13, va="center")
    return figure


def _draw_blocks(axes: Any, blocks: list[tuple[str, str, Tensor, list[float], list[float]]]) -> None:
    """Draw blocks of scores, one row per query.

    A block is a tuple: its title, what its columns are, the scores, and the x and y of a line through slot 0.
    """
    most = float(blocks[0][2].nan_to_num().abs().max())
    for axis, (title, columns, scores, *line) in zip(axes, blocks, strict=True):
        signed_image(axis, scores, most)
        axis.set(title=title, xlabel=columns, ylabel="query", xticks=[], yticks=[])
        axis.plot(*line, "k-", linewidth=1)


def _dynamic_mlp(seen: Capture) -> Any:
    W2, a = seen.second_layer(0, STEP), seen.trace.activation[0, 0, STEP][None]
    parts = [
        ("x", seen.inputs[0, STEP][None], "·"),
        ("W1(X)", seen.first_layer(0, STEP), "→"),
        ("relu(h / ρ)", a, "·"),
        ("W2(X)", W2, "="),
        ("o", a @ W2, ""),
    ]
    units = f"{int((a > 0).sum())} of {STEP + 1} hidden units are active"
    return _equation(parts, f"one head at step {STEP + 1}: both layers are built from the context; {units}")


def _dplr(seen: Capture) -> Any:
    mix = kernels(seen.heads.mix1, 0, STEP + 1)
    assert mix is not None
    parts = [
        ("R1 at this step", seen.mix(1, 0, STEP), "="),
        ("I + Diag(p)", torch.diag(1 + mix.diag), "+"),
        ("A", mix.left, "·"),
        ("Diag(s(x))", torch.diag(mix.gate[STEP]), "·"),
        ("Bᵀ", mix.right.T, ""),
    ]
    return _equation(
        parts, "a mix is a diagonal plus a gated low rank: two thin products, not one square product"
    )


def _scores(seen: Capture) -> Tensor:
    """Return the scores by position, zero for keys after the query."""
    return (seen.heads.q[0, :, 0] @ seen.heads.k[0, :, 0].T).tril()


def _lag_layout(seen: Capture) -> Any:
    caption = "in lag order a parameter belongs to the same distance at every step; the black line is slot 0"
    figure, later = _figure(7, 3.4, caption), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    by_position, by_lag = (x.masked_fill(later, torch.nan) for x in (_scores(seen), seen.trace.scores[0, 0]))
    ends = [-0.4, LENGTH - 0.6]
    blocks = [
        ("scores by position", "key", by_position, ends, ends),
        ("the same scores in lag order", "slot: 0 is the query itself", by_lag, [0.0, 0.0], ends),
    ]
    _draw_blocks(figure.subplots(1, 2), blocks)
    return figure


def _skewed_buffer(seen: Capture) -> Any:
    """Draw a block of rows kept in ordinary order, and the same memory read with a longer row stride."""
    figure = _figure(7, 3.6, "the same memory, read twice: nothing is moved, and each lag has its own column")
    size, wide = 6, LENGTH + 6
    buffer = torch.zeros(size * wide + size, dtype=torch.float64)
    buffer.as_strided((size, LENGTH), (wide, 1), size)[:] = _scores(seen)[-size:]
    plain = buffer.as_strided((size, wide), (wide, 1), 0)
    skewed = buffer.as_strided((size, wide), (wide + 1, 1), 0)[:, : LENGTH + 1]
    own = float(LENGTH)  # column of the first query's own key
    blocks = [
        (f"row stride {wide}: by position", "", plain, [own, own + size - 1], [0.0, size - 1.0]),
        (f"row stride {wide + 1}: by lag", "", skewed, [own, own], [-0.4, size - 0.6]),
    ]
    _draw_blocks(figure.subplots(2, 1), blocks)
    return figure


if __name__ == "__main__":
    for written in draw_all(Path(__file__).parent):
        print(f"wrote {written}")
