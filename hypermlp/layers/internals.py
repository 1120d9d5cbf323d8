"""The internals of a layer that ``hypermlp.inspect`` and ``hypermlp.theory`` read.

Only this file depends on how a layer prepares the operands of the operator.

Shapes: B batch, T positions, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hypermlp.errors import UserError
from hypermlp.layers.baselines.parts import at_least_float32
from hypermlp.layers.gates import Gates, GateValues
from hypermlp.layers.mixer import Mixer
from hypermlp.layers.plain import is_plain
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.visibility import Visibility, document_origins
from hypermlp.ops import Mix
from hypermlp.ops.api import causal_conv
from hypermlp.ops.arguments import Attention


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


def gate_values(layer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """Return the sigmoid gates at ``x`` ``[..., D]`` by name, each ``[..., width]``."""
    return {} if layer.gates is None else named_gates(layer.gates(x), x.dim() - 1)


def named_gates(values: GateValues, dims: int) -> dict[str, Tensor]:
    """Return the gates that a layer has by name, each with one dimension after the first ``dims``."""
    return {name: gate.flatten(dims) for name, gate in values._asdict().items() if gate is not None}


def gate_parameters(layer: Mixer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return views of the weights ``[D, ...]`` and biases of the gates by name."""
    if layer.gates is None:
        return {}, {}
    return layer.gates.split(layer.gates.weight.T), layer.gates.split(layer.gates.bias)


def convolved(layer: Mixer, x: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows ``[B, T, D]`` that keys and values are projected from; ``starts`` is ``[B, T]``."""
    if layer.k_conv is None or layer.v_conv is None:
        return x, x
    length = x.shape[1]
    reach = None if starts is None else torch.arange(1, length + 1, device=x.device) - starts
    weights = (layer.k_conv, layer.v_conv)
    keys_from, values_from = causal_conv(x, weights, length, reach, backend="reference")
    return keys_from, values_from


def rotated(layer: Mixer, rows: Tensor, t: int, starts: Tensor | None) -> Tensor:
    """Rotate ``rows`` ``[n, Dk]`` to position t of a sequence with ``starts`` ``[T]``, if there is RoPE."""
    if not layer.config.rope:
        return rows
    origin = 0 if starts is None else int(document_origins(starts[None, : t + 1])[0, -1])
    positions = torch.full((1, len(rows)), t - origin, device=rows.device)
    return rotate(rows[None, :, None], positions, Rope.of(layer.config))[0, :, 0]


def operands(layer: Mixer, x: Tensor, starts: Tensor | None) -> tuple[Tensor, Attention, dict[str, Tensor]]:
    """Return what ``layer(x, starts=starts)`` computes before the operator.

    Returns: the input behind the registers, with zeros in place of padding; the arguments of the operator;
    and the gates by name. The last two are in float32 or better.
    """
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gates"):
        part = getattr(layer, name)
        if part is not None and not is_plain(part, Gates if name == "gates" else nn.Linear):
            raise UserError(
                f"{name} has an adapter or hooks, but a capture reads its weights; "
                "merge the adapter or remove the hooks"
            )
    layer._check(x, None, starts)
    if layer.window is not None and x.shape[1] > layer.window:
        raise UserError(
            f"{x.shape[1]} positions, but the layer has a sliding window of {layer.window}, and a capture "
            "shows whole contexts; pass at most so many positions"
        )
    if layer.registers is not None:
        if starts is not None:
            raise UserError(
                "starts is given, but a layer with registers is captured one whole sequence at a time; "
                "pass no starts, no padding and no packed documents"
            )
        x = torch.cat([layer.registers.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
    visibility = Visibility(
        starts, past=0, new=x.shape[1], device=x.device, max_visible=layer.config.max_length
    )
    x = visibility.hide_padding(x)
    projected = layer.project(x, None, visibility)
    in_float = tree_map_only(Tensor, at_least_float32, projected)
    arguments = in_float.arguments._replace(starts=projected.arguments.starts)
    return x, arguments, named_gates(in_float.gates, 2)
