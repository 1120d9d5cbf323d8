"""The internals of a layer that captures and the theory read.

Only this file depends on how a layer orders its gates and prepares the operands of the operator.

Shapes: B batch, T positions, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hypermlp.errors import UserError
from hypermlp.layers.common import causal_conv_pair, rotate
from hypermlp.layers.mixer import Heads, Mixer, positions_in_document
from hypermlp.layers.step import is_plain
from hypermlp.ops import Mix
from hypermlp.ops.layout import row_starts

GATES = ("query", "output", "mix1", "mix2")


class Kernels(NamedTuple):
    """One sequence mix of a branch or head: ``R = I + Diag(diag) + left Diag(gate) rightᵀ``."""

    diag: Tensor  # [slots]
    left: Tensor  # [slots, r]
    right: Tensor  # [slots, r]
    gate: Tensor  # [T, r]

    def added(self, t: int) -> Tensor:
        """Return R - I ``[slots, slots]`` at position t."""
        return torch.diag(self.diag) + self.left * self.gate[t] @ self.right.T


def kernels(mix: Mix | None, index: int, slots: int, batch: int = 0) -> Kernels | None:
    """Return the first slots of a mix for one branch or head; None if there is no mix."""
    if mix is None:
        return None
    diag, left, right = (part[index, :slots].detach() for part in (mix.diag, mix.left, mix.right))
    return Kernels(diag, left, right, mix.gate[batch, :, index])


def _by_gate(layer: Mixer, fused: Tensor) -> dict[str, Tensor]:
    """Split the last dimension of ``fused``, which has an entry for each gate, into views by name.

    The names are "query", "output", "mix1" and "mix2"; gates that the layer does not have are left out.
    """
    parts = zip(GATES, fused.split(layer.gate_sizes, dim=-1), strict=True)
    return {name: part for name, part in parts if part.shape[-1]}


def gate_values(layer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """Return the sigmoid gates at ``x`` ``[..., D]`` by name."""
    return {} if layer.gates is None else _by_gate(layer, torch.sigmoid(layer.gates(x)))


def gate_parameters(layer: Mixer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return views of the weights ``[D, ...]`` and biases of the gates by name."""
    if layer.gates is None:
        return {}, {}
    return _by_gate(layer, layer.gates.weight.T), _by_gate(layer, layer.gates.bias)


def convolved(layer: Mixer, x: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows ``[B, T, D]`` that keys and values are projected from; ``starts`` is ``[B, T]``."""
    if layer.k_conv is None or layer.v_conv is None:
        return x, x
    return causal_conv_pair(x, layer.k_conv, layer.v_conv, x.shape[1], _reach(starts), backend="reference")


def _reach(starts: Tensor | None) -> Tensor | None:
    """Return the number of positions that each position sees, itself included."""
    return None if starts is None else torch.arange(1, starts.shape[1] + 1, device=starts.device) - starts


def rotated(layer: Mixer, rows: Tensor, t: int, starts: Tensor | None) -> Tensor:
    """Rotate ``rows`` ``[n, Dk]`` to position t of a sequence with ``starts`` ``[T]``, if there is RoPE."""
    if not layer.config.rope:
        return rows
    known = None if starts is None else starts[None, : t + 1]
    positions = positions_in_document(torch.arange(t + 1, device=rows.device), known)[:, -1:]
    return rotate(rows[None, :, None], positions.expand(1, len(rows)), layer.config.rope_theta)[0, :, 0]


def operands(layer: Mixer, x: Tensor, starts: Tensor | None) -> tuple[Tensor, Heads, Tensor | None]:
    """Return what ``layer(x, starts=starts)`` computes before the operator.

    Returns: the input behind the registers, with zeros in place of padding; the operands of the operator, in
    float32 or better; and ``starts`` as ``[B, T]``.
    """
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
                "starts is given, but a layer with registers is captured one whole sequence at a time; "
                "pass no starts, no padding and no packed documents"
            )
        x = torch.cat([layer.registers.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
    if starts is not None:
        starts = row_starts(starts.long(), x.shape[1], x.shape[1], layer.config.max_length)
    reach = _reach(starts)
    if reach is not None:
        x = x.masked_fill((reach < 1)[:, :, None], 0)
    heads = layer.project(x, None, reach, starts)
    in_float = tree_map_only(Tensor, lambda y: y.to(torch.promote_types(y.dtype, torch.float32)), heads)
    return x, in_float, starts
