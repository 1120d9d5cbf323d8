"""The paper's conceptual figures, drawn from the tensors of a real layer: ``python -m hypermlp.inspect.concepts docs/figures``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp import HyperMLP
from hypermlp.inspect.capture import Capture, capture
from hypermlp.inspect.figures import pyplot, save

LENGTH, HIDDEN, STEP = 14, 20, 13


def example() -> Capture:
    """A small layer with parameters of everyday size; its gates and kernels are then easy to see."""
    torch.manual_seed(3)
    layer = (
        HyperMLP(HIDDEN, max_length=LENGTH, num_heads=1, rank=3, conv_kernel=1).double().requires_grad_(False)
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert layer.mix1 is not None
    lags = torch.arange(LENGTH, dtype=torch.float64)
    for parameter in (layer.mix1.left, layer.mix1.right):  # smooth in the lag, as trained ones become
        parameter[0] = (
            torch.stack([torch.exp(-lags / 4), torch.cos(lags / 2), -torch.exp(-lags / 9)], dim=1) * 0.5
        )
    layer.mix1.diag[0] = 0.6 * torch.exp(-lags / 3)
    return capture(layer, torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64))


def draw_all(folder: Path) -> Iterator[Path]:
    seen = example()
    for name, draw in (
        ("dynamic-mlp", _dynamic_mlp),
        ("lag-layout", _lag_layout),
        ("skewed-buffer", _skewed_buffer),
        ("dplr", _dplr),
    ):
        yield from save(draw(seen), folder, name)


def _row_of(parts: list[tuple[str, Tensor, str]], below: str) -> Any:
    """Matrices in a row, as large as they are, with signs between them; ``below``: what it says."""
    widths = [max(part.shape[1], 4) for _, part, _ in parts]
    figure = pyplot()(figsize=(9, 2.7), layout="constrained")
    axes = figure.subplots(1, len(parts), width_ratios=widths, squeeze=False)[0]
    for axis, (title, part, sign) in zip(axes, parts, strict=True):
        most = float(part.abs().max()) or 1.0
        axis.imshow(part.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axis.set_title(title)
        axis.set(xticks=[], yticks=[])
        axis.set_xlabel(" × ".join(map(str, part.shape)))
        axis.text(1.08, 0.5, sign, transform=axis.transAxes, fontsize=13, va="center")
    figure.supxlabel(below, fontsize=9)
    return figure


def _dynamic_mlp(seen: Capture) -> Any:
    W1, W2 = seen.first_layer(0, STEP), seen.second_layer(0, STEP)
    a = seen.trace.activation[0, 0, STEP][None]
    parts = [
        ("x", seen.inputs[0, STEP][None], "·"),
        ("W1(X)", W1, "→"),
        ("relu(h / ρ)", a, "·"),
        ("W2(X)", W2, "="),
        ("o", a @ W2, ""),
    ]
    return _row_of(
        parts,
        f"a head at step {STEP + 1}: two layers made of the context, {STEP + 1} hidden units, {int((a > 0).sum())} of them on",
    )


def _dplr(seen: Capture) -> Any:
    mix = seen.heads.mix1
    assert mix is not None
    count = STEP + 1
    identity = torch.eye(count, dtype=torch.float64) + torch.diag(mix.diag[0, :count])
    parts = [
        ("R1 at this step", seen.mix(1, 0, STEP), "="),
        ("I + Diag(p)", identity, "+"),
        ("A", mix.left[0, :count], "·"),
        ("Diag(s(x))", torch.diag(mix.gate[0, STEP, 0]), "·"),
        ("Bᵀ", mix.right[0, :count].T, ""),
    ]
    return _row_of(
        parts,
        "a mix is a diagonal and a low rank, gated by the input: two thin products instead of a square one",
    )


def _lag_layout(seen: Capture) -> Any:
    heads = seen.heads
    ordinary = torch.einsum("td,sd->ts", heads.q[0, :, 0], heads.k[0, :, 0]).tril()
    lag = seen.trace.scores[0, 0]
    figure = pyplot()(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    most = float(ordinary.abs().max())
    for axis, part, title, across in (
        (axes[0], ordinary, "scores by position", "key"),
        (axes[1], lag, "the same scores in lag order", "slot: 0 is the query itself"),
    ):
        shown = part.masked_fill(~torch.ones_like(part, dtype=torch.bool).tril(), float("nan"))
        axis.imshow(shown.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axis.set(title=title, xlabel=across, ylabel="query", xticks=[], yticks=[])
    axes[0].plot(range(LENGTH), range(LENGTH), "k-", linewidth=1)
    axes[1].plot([0, 0], [-0.4, LENGTH - 0.6], "k-", linewidth=1)
    figure.supxlabel(
        "one parameter per lag then means the same distance at every step: the black diagonal is slot 0",
        fontsize=9,
    )
    return figure


def _skewed_buffer(seen: Capture) -> Any:
    """A block of rows kept in ordinary order, and the same memory read with one more in the stride."""
    heads, block = seen.heads, 6
    rows = torch.einsum("td,sd->ts", heads.q[0, -block:, 0], heads.k[0, :, 0])
    position = torch.arange(LENGTH - block, LENGTH)[:, None]
    rows = rows.masked_fill(torch.arange(LENGTH) > position, 0)
    wide = LENGTH + block
    buffer = rows.new_zeros(block * wide + block)
    buffer.as_strided((block, LENGTH), (wide, 1), block)[:] = rows
    plain = buffer.as_strided((block, wide), (wide, 1), 0)
    skewed = buffer.as_strided((block, wide), (wide + 1, 1), 0)[:, : LENGTH + 1]
    figure = pyplot()(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots(2, 1)
    most = float(rows.abs().max())
    last = LENGTH - block + block  # column of the first row's own key
    for axis, part, title in (
        (axes[0], plain, f"row stride {wide}: by position"),
        (axes[1], skewed, f"row stride {wide + 1}: by lag"),
    ):
        axis.imshow(part.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        axis.set(title=title, xticks=[], yticks=[], ylabel="query")
    axes[0].plot([last, last + block - 1], [0, block - 1], "k-", linewidth=1)
    axes[1].plot([last, last], [-0.4, block - 0.6], "k-", linewidth=1)
    figure.supxlabel(
        "the same numbers in memory: nothing is moved, and each lag has a column of its own", fontsize=9
    )
    return figure


if __name__ == "__main__":
    for written in draw_all(Path(sys.argv[1])):
        print(f"wrote {written}")
