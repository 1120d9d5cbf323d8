"""The internals of a layer that captures and the theory read.

Only this file depends on how a layer orders its gates and prepares the operands of the operator.

Shapes: B batch, T positions, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.errors import UserError
from hypermlp.layers.common import causal_conv_pair, rotate
from hypermlp.layers.mixer import Heads, Mixer, positions_in_document
from hypermlp.layers.step import is_plain
from hypermlp.ops import Mix
from hypermlp.ops.layout import row_starts

GATES = ("query", "output", "mix1", "mix2")


def by_gate(layer: Mixer, fused: Tensor) -> dict[str, Tensor]:
    """Split the last dimension of ``fused``, which has an entry for each gate, into views by name.

    The names are "query", "output", "mix1" and "mix2"; gates that the layer does not have are left out.
    """
    parts = zip(GATES, fused.split(layer.gate_sizes, dim=-1), strict=True)
    return {name: part for name, part in parts if part.shape[-1]}


def gate_values(layer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """Return the sigmoid gates at ``x`` ``[..., D]`` by name."""
    return {} if layer.gates is None else by_gate(layer, torch.sigmoid(layer.gates(x)))


def gate_logits_on_plane(layer: Mixer, plane: Tensor) -> dict[str, Tensor]:
    """Return what the sigmoids are applied to, by name, on a plane ``[3, D]`` of a point and two directions.

    The bias counts at the point alone, so that combinations of the rows are the logits at points of the
    plane.
    """
    if layer.gates is None:
        return {}
    logits = plane @ layer.gates.weight.T.to(plane.dtype)
    logits[0] += layer.gates.bias
    return by_gate(layer, logits)


def convolved(layer: Mixer, x: Tensor, reach: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows ``[B, T, D]`` that the keys and the values are projected from.

    ``reach`` holds the number of positions, itself included, that each position sees; None means all.
    """
    if layer.k_conv is None or layer.v_conv is None:
        return x, x
    return causal_conv_pair(x, layer.k_conv, layer.v_conv, x.shape[1], reach, backend="reference")


def rotated(layer: Mixer, rows: Tensor, positions: Tensor) -> Tensor:
    """Rotate ``rows`` ``[n, Dk]`` to their ``positions`` ``[n]``; without RoPE return them as they are."""
    if not layer.config.rope:
        return rows
    return rotate(rows[None, :, None], positions[None], layer.config.rope_theta)[0, :, 0]


class Operands(NamedTuple):
    """The operands of the operator for one call of a layer, in float32 or better."""

    inputs: Tensor
    """``[B, T, D]``: the input, behind the registers, with zeros in place of padding."""
    heads: Heads
    starts: Tensor | None
    """``[B, T]``"""
    reach: Tensor | None
    """``[B, T]``: the number of positions that each position sees."""
    positions: Tensor
    """``[B or 1, T]``: positions counted from the first one of the document."""


def operands(layer: Mixer, x: Tensor, starts: Tensor | None) -> Operands:
    """Compute what ``layer(x, starts=starts)`` passes to the operator."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gates"):
        part = getattr(layer, name)
        if part is not None and not is_plain(part, nn.Linear):
            raise UserError(
                f"{name} has an adapter or hooks, but a capture reads its weights; "
                "merge the adapter or remove the hooks"
            )
    layer._check(x, None, starts)
    if layer.registers is not None:
        if starts is not None:
            raise UserError(
                "starts is given, but a layer with registers can only be captured over whole sequences; "
                "pass sequences without padding or packing, and no starts"
            )
        x = torch.cat([layer.registers.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
    length, reach = x.shape[1], None
    positions = torch.arange(length, device=x.device)
    if starts is not None:
        starts = row_starts(starts.long(), length, length, layer.config.max_length)
        reach = positions + 1 - starts
        x = x.masked_fill((reach < 1)[:, :, None], 0)
    heads = _in_float(layer.project(x, None, reach, starts))
    return Operands(x, heads, starts, reach, positions_in_document(positions, starts))


def _in_float(heads: Heads) -> Heads:
    """Cast half precision to float32, as the operator does."""

    def cast(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    mix1, mix2 = (None if mix is None else Mix(*map(cast, mix)) for mix in (heads.mix1, heads.mix2))
    gate = None if heads.output_gate is None else cast(heads.output_gate)
    return Heads(cast(heads.q), cast(heads.k), cast(heads.v), mix1, mix2, gate)
