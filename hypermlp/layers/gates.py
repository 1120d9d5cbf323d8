"""All sigmoid gates of a layer, from one matrix.

Shapes: D hidden size, G score branches, H heads, Dk, Dv widths, r rank.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.config import MixerConfig
from hypermlp.ops.gating import Gating


class GateValues(NamedTuple):
    """The gates of some positions, each between 0 and 1; None for a gate that the layer does not have."""

    query: Tensor | None = None  # [..., G, Dk]
    output: Tensor | None = None  # [..., H * Dv]
    mix1: Tensor | None = None  # [..., G, r]
    mix2: Tensor | None = None  # [..., H, r]


class Gates(nn.Module):
    """``sigmoid(x W + b)``, split into the gates on the queries, on the head outputs and of both mixes.

    The order of the gates in W is query, output, mix1, mix2; ``offsets`` states it for the operators of a
    layer.
    """

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.shapes = gate_shapes(config)
        self.offsets = gate_offsets(self.shapes)
        linear = nn.Linear(config.hidden_size, sum(math.prod(shape) for shape in self.shapes.values()))
        self.weight, self.bias = linear.weight, linear.bias

    def initialize_parameters(self, init: Any, std: float) -> None:
        init.normal_(self.weight, std=std)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> GateValues:
        """``x``: ``[..., D]``."""
        parts = self.split(torch.sigmoid(self.logits(x)))
        return GateValues(**{name: part.unflatten(-1, self.shapes[name]) for name, part in parts.items()})

    def logits(self, x: Tensor) -> Tensor:
        """Return the gates before the sigmoid, ``[..., columns of W]``."""
        return F.linear(x, self.weight, self.bias)

    def fused(self, x: Tensor, q: Tensor, gating: Gating) -> tuple[Tensor, GateValues]:
        """Return ``q``, ``[..., G, Dk]``, times its gate, and the other gates, from fused kernels."""
        sizes = [math.prod(self.shapes[name]) if name in self.shapes else 0 for name in GateValues._fields]
        given = q.flatten(-2) if sizes[0] else q.new_empty(*q.shape[:-2], 0)
        gated, *parts = gating.gate_queries(self.logits(x), given, sizes)
        values = {
            name: part.unflatten(-1, self.shapes[name])
            for name, part in zip(GateValues._fields[1:], parts, strict=True)
            if name in self.shapes
        }
        return gated.view(q.shape) if sizes[0] else q, GateValues(**values)

    def split(self, fused: Tensor) -> dict[str, Tensor]:
        """Split the last dimension, which has an entry for each column of W, into views by the gates'
        names.
        """
        parts = fused.split([math.prod(shape) for shape in self.shapes.values()], dim=-1)
        return dict(zip(self.shapes, parts, strict=True))


def gate_offsets(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Return the first column of the query, output, first and second mix gates in W; -1 for an absent one."""
    found, column = dict.fromkeys(GateValues._fields, -1), 0
    for name, shape in shapes.items():
        found[name], column = column, column + math.prod(shape)
    return found["query"], found["output"], found["mix1"], found["mix2"]


def gate_shapes(config: MixerConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each gate that a layer has at one position, in the order of their columns."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.feature_gates:
        shapes |= {"query": (config.num_branches, config.qk_dim), "output": (config.vo_width,)}
    if config.mix1:
        shapes["mix1"] = (config.num_branches, config.rank)
    if config.mix2:
        shapes["mix2"] = (config.num_heads, config.rank)
    return shapes
