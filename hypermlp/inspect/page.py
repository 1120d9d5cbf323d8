"""The interactive page. It contains all its data, compressed; inspect.js draws."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp.inspect.panels import Head, Layer, Panels, Routing
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import render

HERE = Path(__file__).parent
COLOURS = 8  # in page.css
CURVE_POINTS = 128
STRONGEST = 5  # tokens that are listed for a step
TINY = torch.finfo(torch.float32).tiny


def page(panels: Panels, model: Any, name: str) -> str:
    """Return the page of a model with this name."""
    mixers, count = ", ".join(dict.fromkeys(model.config.mixers)), sum(p.numel() for p in model.parameters())
    registers = f" behind {panels.registers} registers" if panels.registers else ""
    routing_steps = [head.routing.step for layer in panels.layers for head in layer.heads if head.routing]
    return render(
        HERE / "inspect.html",
        title=f"The memory of {name}",
        about=f"This is {name} ({mixers}; {model.config.num_hidden_layers} layers, {count:,} parameters), "
        f"reading {len(panels.tokens) - panels.registers} tokens{registers}.",
        count=len(panels.tokens),
        registers=panels.registers,
        layers=panels.layers,
        heads=len(panels.layers[0].heads),
        baselines=", ".join(str(index + 1) for index in panels.baselines),
        growth=_growth(panels),
        routed=routing_steps[0] + 1 - panels.registers if routing_steps else 0,
        payload=encoded(panels),
        script=(HERE / "inspect.js").read_text(encoding="utf-8"),
    )


def _growth(panels: Panels) -> str | None:
    """Return a chart of the number of active slots at each step; None if no head switches slots off."""
    length, first = len(panels.tokens), panels.registers
    last = length - first - 1
    steps = sorted({first + round(i * last / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    registers = f" and for each of {first} registers" if first else ""
    everything = f"all slots: one for each token so far{registers}"
    series = [Series([(t + 1 - first, t + 1) for t in steps], "all", everything)]
    for layer in filter(lambda layer: layer.selects, panels.layers):
        for number, head in enumerate(layer.heads, 1):
            counts = head.active.sum(-1).tolist()
            end = f"{counts[-1]} of {length} slots active at the end ({counts[-1] / length:.0%})"
            points = [(t + 1 - first, counts[t]) for t in steps]
            tip = f"layer {layer.index + 1}, head {number}\n{end}"
            series.append(Series(points, f"c{layer.index % COLOURS}", tip))
    return line_chart(series, x="tokens so far", y="active slots") if len(series) > 1 else None


def encoded(panels: Panels) -> str:
    """Return the page's data as base64 of a deflated buffer.

    The buffer holds the length of a JSON text, the text, and one byte for each entry of the heat maps' lower
    triangles.
    """
    triangles = [
        _triangle(head, which)
        for layer in panels.layers
        for head in layer.heads
        for which in ("activation", "contribution")
    ]
    described = {
        "tokens": panels.tokens,
        "registers": panels.registers,
        "layers": [_layer(layer) for layer in panels.layers],
        "peaks": [_numbers(peaks, 4) for peaks, _ in triangles],
    }
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    packed = struct.pack("<I", len(text)) + text + b"".join(data for _, data in triangles)
    return base64.b64encode(zlib.compress(packed, 9)).decode()


def _triangle(head: Head, which: str) -> tuple[Tensor, bytes]:
    """Return the peak of each row, and the triangle's bytes, row by row.

    A byte is the square root of the share of the peak, which keeps small values visible.
    """
    values = getattr(head, which).float().abs()
    peaks = values.amax(dim=1)
    level = (255 * (values / peaks.clamp(min=TINY)[:, None]).sqrt()).round()
    if which == "activation":  # an active slot must not round to 0
        level = torch.where(head.active, level.clamp(min=1), 0.0)
    rows, columns = torch.tril_indices(*values.shape)
    return peaks, level[rows, columns].to(torch.uint8).cpu().numpy().tobytes()


def _strongest(contribution: Tensor) -> list[list[tuple[int, float]]]:
    """Return, for each row, the strongest tokens with their percentage of the sum of all contributions."""
    shares = contribution.float() / contribution.float().sum(1, keepdim=True).clamp(min=TINY)
    best = shares.topk(min(STRONGEST, shares.shape[1]), dim=1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [(key, round(100 * share, 1)) for key, share in zip(keys, row, strict=True) if share > 0]
        for keys, row in rows
    ]


def _layer(layer: Layer) -> dict[str, Any]:
    heads = [
        {
            "mixes": [
                {"name": name, **_fields(mix, 3, "diag", "left", "right", "gate")}
                for name, mix in head.mixes.items()
            ],
            "routing": _routing(head.routing),
            "strongest": _strongest(head.contribution),
        }
        for head in layer.heads
    ]
    gates = {name: _numbers(shares, 4) for name, shares in layer.gates.items()}
    described = {name: getattr(layer, name) for name in ("index", "activation", "layout")}
    return {**described, "heads": heads, "gates": gates}


def _routing(routing: Routing | None) -> dict[str, Any] | None:
    """Return the routing, with more digits than curves need: a border is where a sum changes its sign."""
    if routing is None:
        return None
    mix = routing.kernels
    described = _fields(routing, 7, "query", "query_gate", "keys", "mix_gate")
    return {**described, "step": routing.step, "mix": mix and _fields(mix, 7, "diag", "left", "right")}


def _fields(record: Any, digits: int, *names: str) -> dict[str, Any]:
    return {name: _numbers(getattr(record, name), digits) for name in names}


def _numbers(values: Tensor | None, digits: int) -> Any:
    """Return nested lists of numbers with this many significant digits."""
    if values is None or values.dim() == 0:
        return None if values is None else float(f"{values.item():.{digits}g}")
    return [_numbers(row, digits) for row in values]
