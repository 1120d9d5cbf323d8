"""The interactive page: everything that it shows is in it, compressed; inspect.js draws."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypermlp.inspect.panels import Head, Kernels, Layer, Panels, Routing
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import render

HERE = Path(__file__).parent
COLOURS = 8  # in page.css
CURVE_POINTS = 128
STRONGEST = 5


def page(found: Panels, title: str, about: str) -> str:
    script = (HERE / "inspect.js").read_text(encoding="utf-8")
    steps = [head.routing.step for layer in found.layers for head in layer.heads if head.routing is not None]
    routed = steps[0] + 1 - found.registers if steps else 0
    return render(
        HERE / "inspect.html",
        title=title,
        about=about,
        count=len(found.tokens),
        registers=found.registers,
        layers=found.layers,
        heads=len(found.layers[0].heads),
        peers=", ".join(str(index + 1) for index in found.peers),
        growth=_growth(found),
        routed=routed,
        payload=encoded(found),
        script=script,
    )


def _growth(found: Panels) -> str | None:
    """How many slots are active at each step, for every head that selects."""
    length, first = len(found.tokens), found.registers
    steps = sorted(
        {first + round(i * (length - first - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)}
    )
    behind = f" and for each of {first} registers" if first else ""
    series = [
        Series(
            [(t + 1 - first, t + 1) for t in steps], "all", f"all slots: one for each token so far{behind}"
        )
    ]
    for layer in found.layers:
        for number, head in enumerate(layer.heads, 1):
            if layer.activation == "softmax":
                continue
            counts = head.active.sum(-1)
            share = float(counts[-1]) / length
            tip = f"layer {layer.index + 1}, head {number}\n{int(counts[-1])} of {length} slots active at the end ({share:.0%})"
            series.append(
                Series([(t + 1 - first, int(counts[t])) for t in steps], f"c{layer.index % COLOURS}", tip)
            )
    return line_chart(series, x="tokens so far", y="active slots") if len(series) > 1 else None


def encoded(found: Panels) -> str:
    """Base64 of deflated: the length of a JSON text, that text, and a byte for each entry of the heat maps' lower triangles."""
    triangles = [
        _triangle(head, which)
        for layer in found.layers
        for head in layer.heads
        for which in ("activation", "contribution")
    ]
    described = {
        "tokens": found.tokens,
        "registers": found.registers,
        "layers": [_layer(layer) for layer in found.layers],
        "peaks": [_numbers(peaks, 4) for peaks, _ in triangles],
    }
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    packed = struct.pack("<I", len(text)) + text + b"".join(data for _, data in triangles)
    return base64.b64encode(zlib.compress(packed, 9)).decode()


def _triangle(head: Head, which: str) -> tuple[Tensor, bytes]:
    """Every row's peak, and bytes, row after row: the square root of the share of it, so that what is faint still shows."""
    values = getattr(head, which).float().abs()
    peaks = values.amax(dim=1)
    level = (255 * (values / peaks.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).sqrt()).round()
    if which == "activation":  # what is active is seen to be
        level = torch.where(head.active, level.clamp(min=1), torch.zeros(()))
    rows, columns = torch.tril_indices(*values.shape)
    return peaks, level[rows, columns].to(torch.uint8).cpu().numpy().tobytes()


def _strongest(contribution: Tensor) -> list[list[list[float]]]:
    """Of every row, the tokens that contribute most, each with its share of all lengths in percent."""
    best = contribution.float().topk(min(STRONGEST, contribution.shape[1]), dim=1)
    total = contribution.float().sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    return [
        [
            [int(key), round(100 * float(value / whole), 1)]
            for key, value in zip(keys, values, strict=True)
            if value > 0
        ]
        for keys, values, whole in zip(best.indices, best.values, total, strict=True)
    ]


def _layer(layer: Layer) -> dict[str, Any]:
    heads = [
        {
            "mixes": [_mix(mix) for mix in head.mixes],
            "routing": _routed(head.routing),
            "strongest": _strongest(head.contribution),
        }
        for head in layer.heads
    ]
    gates = {name: _numbers(shares, 4) for name, shares in layer.gates.items()}
    return {
        "index": layer.index,
        "activation": layer.activation,
        "layout": layer.layout,
        "heads": heads,
        "gates": gates,
    }


def _mix(mix: Kernels, digits: int = 3) -> dict[str, Any]:
    fields = {name: _numbers(getattr(mix, name), digits) for name in ("diag", "left", "right", "gate")}
    return {"name": mix.name, **fields}


def _routed(routing: Routing | None) -> dict[str, Any] | None:
    """With more digits than the curves: a boundary is where a sum of them changes its sign."""
    if routing is None:
        return None
    slots = len(routing.keys)
    mix = routing.kernels
    kernels = (
        None
        if mix is None
        else Kernels(mix.name, mix.diag[:slots], mix.left[:slots], mix.right[:slots], mix.gate[:0])
    )
    return {
        "step": routing.step,
        "query": _numbers(routing.query, 7),
        "query_gate": None if routing.query_gate is None else _numbers(routing.query_gate, 7),
        "keys": _numbers(routing.keys, 7),
        "mix_gate": None if routing.mix_gate is None else _numbers(routing.mix_gate, 7),
        "mix": None if kernels is None else _mix(kernels, 7),
    }


def _numbers(values: Tensor, digits: int) -> Any:
    """Nested lists, each number with so many significant digits."""
    if values.dim() == 0:
        return float(f"{values.item():.{digits}g}")
    return [_numbers(row, digits) for row in values]
