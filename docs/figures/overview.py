"""Draw the README's picture: learning curves of the two shipped models, and the speed of the layer.

    python docs/figures/overview.py          # or: make picture

The curves are on the cards of the models (hypermlp/checkpoints), the times in docs/results/bench-op.json.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

from hypermlp.checkpoints import find_shipped
from hypermlp.reporting.records import read_record

DOCS = Path(__file__).parents[1]
COLOURS = {"HyperGLU": "#1b6ca8", "softmax attention": "#d1603d"}
MODELS = {"HyperGLU": "tiny", "softmax attention": "tiny-softmax"}
TIMES = {
    "layer forward": "layer, forward",
    "layer forward+backward": "layer, forward\nand backward",
    "layer decode one token": "layer, one token",
}


def draw() -> Figure:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, model in MODELS.items():
        card = json.loads((find_shipped(model) / "card.json").read_text())
        steps, losses = zip(*card["validation_curve"], strict=True)
        label = f"{name}: {card['validation_loss']:.3f}"
        left.plot(steps, losses, color=COLOURS[name], label=label, linewidth=1.6)
    left.set(title="1M parameters on Python's source", xlabel="step", ylabel="held-out loss, nats per byte")
    left.legend(frameon=False)
    rows = {
        row["what"]: row
        for row in read_record(DOCS / "results" / "bench-op.json", "bench-op")["results"]
        if row["backend"] == "native"
    }
    for place, what in enumerate(TIMES):
        softmax = min(rows[what]["softmax_ms"].values())
        right.barh(place - 0.2, 1, 0.36, color=COLOURS["softmax attention"])
        right.barh(place + 0.2, rows[what]["ours_ms"] / softmax, 0.36, color=COLOURS["HyperGLU"])
        right.text(1.02, place - 0.2, f"{softmax:.3g} ms", va="center", fontsize=8)
        ours = rows[what]["ours_ms"]
        right.text(ours / softmax + 0.02, place + 0.2, f"{ours:.3g} ms", va="center", fontsize=8)
    right.set(
        title="CPU time, width 768, 1024 positions", xlabel="relative to PyTorch's fused softmax attention"
    )
    right.set(xlim=(0, 1.2), yticks=range(len(TIMES)), yticklabels=TIMES.values())
    right.invert_yaxis()
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y" if axes is left else "x")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    path = DOCS / "figures" / "overview.png"
    draw().savefig(path, dpi=130)
    print(f"wrote {path}")
