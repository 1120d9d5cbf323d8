"""What a layer does with an input: its memory, instantiated and activated, step by step.

The layer itself is not changed and computes as ever; what is captured follows from its own projections and the operator's definition.

Shapes: B batch, T positions, D hidden size, H heads, G score branches, S slots (as many as positions), K keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig, require
from hypermlp.errors import UserError
from hypermlp.layers.mixer import Mixer
from hypermlp.layers.rotary import rotate
from hypermlp.layers.step import is_plain
from hypermlp.ops.api import causal_conv_pair
from hypermlp.ops.arguments import Mix
from hypermlp.ops.layout import row_starts, slot_maps
from hypermlp.ops.reference import Trace, trace


@dataclass(frozen=True)
class Capture:
    """One layer and one input. Positions count from 0, slots from 0; in layout "lag" slot i of position t is key t - i.

    Registers are positions too, the first ``config.num_registers``.
    """

    layer: Mixer
    inputs: Tensor
    """``[B, T, D]``"""
    heads: Heads
    """Queries (turned and gated), keys, values, mixes, output gate, as the operator gets them."""
    trace: Trace
    """Scores, pre-activations, activations and weights; in slot order."""
    gates: dict[str, Tensor]
    """``query``, ``output``, ``mix1``, ``mix2``: the sigmoid gates ``[B, T, ...]`` that the layer has."""
    starts: Tensor | None
    """``[B, T]``"""

    @property
    def config(self) -> MixerConfig:
        return self.layer.config

    @property
    def active(self) -> Tensor:
        """bool ``[B, H, T, S]``: the activated memory."""
        if self.config.activation == "softmax":
            return self.trace.exists.expand(self.trace.activation.shape)
        return self.trace.pre_activation[:, : self.config.num_heads] > 0

    @property
    def rho(self) -> Tensor:
        """``[B, H, T]``: the norm that scores are divided by."""
        gate = self.trace.pre_activation[:, : self.config.num_heads]
        return (gate.square().sum(-1) + self.config.eps).sqrt()

    @property
    def key_of_slot(self) -> Tensor:
        """int64 ``[B or 1, T, S]``; meaningful where a slot exists."""
        length = self.inputs.shape[1]
        return slot_maps(self.config.layout, self.starts, length, length, self.inputs.device)[0]

    def width(self, t: int, batch: int = 0) -> int:
        """How many slots there are at a position."""
        exists = self.trace.exists
        return int(exists[min(batch, exists.shape[0] - 1), 0, t].sum())

    def mix(self, which: int, index: int, t: int, batch: int = 0) -> Tensor:
        """``[slots, slots]``: R of a branch (1) or head (2) as it is at a position; the identity where there is no mix."""
        require("which", which, which in (1, 2), "1 or 2")
        count = self.width(t, batch)
        identity = torch.eye(count, dtype=self.heads.q.dtype, device=self.inputs.device)
        mix = (self.heads.mix1, self.heads.mix2)[which - 1]
        if mix is None:
            return identity
        diag, left, right = (parameter[index, :count] for parameter in (mix.diag, mix.left, mix.right))
        return identity + torch.diag(diag) + left * mix.gate[batch, t, index] @ right.T

    def first_layer(self, branch: int, t: int, batch: int = 0) -> Tensor:
        """W1 ``[D, slots]``, so that ``x[t] @ W1`` is the pre-activation."""
        config = self.config
        rows = slice(branch * config.qk_dim, (branch + 1) * config.qk_dim)
        address = self.layer.q_proj.weight[rows].T.to(self.heads.q.dtype)  # [D, Dk]
        if config.rope:
            position = positions_in_document(
                torch.arange(self.inputs.shape[1], device=address.device), self.starts
            )
            at = position[min(batch, len(position) - 1), t].expand(1, len(address))
            address = rotate(address[None, :, None], at, config.rope_theta)[0, :, 0]
        if "query" in self.gates:
            address = address * self.gates["query"][batch, t, rows]
        return (
            address @ self._slots(self.heads.k[batch, :, branch], t, batch).T @ self.mix(1, branch, t, batch)
        )

    def second_layer(self, head: int, t: int, batch: int = 0) -> Tensor:
        """W2 ``[slots, D]``, so that ``activation @ W2``, summed over heads, is the output."""
        values = self.mix(2, head, t, batch).T @ self._slots(self.heads.v[batch, :, head], t, batch)
        return self._read(values, head, t, batch)

    def pool(self, head: int, t: int, batch: int = 0) -> tuple[Tensor, Tensor]:
        """U and V ``[slots, D]``: the memory slots, as combinations of the context's rows (after the convolutions)."""
        keys_from = values_from = self.inputs
        if self.layer.k_conv is not None and self.layer.v_conv is not None:
            length = self.inputs.shape[1]
            reach = (
                None
                if self.starts is None
                else torch.arange(1, length + 1, device=self.inputs.device) - self.starts
            )
            keys_from, values_from = causal_conv_pair(
                self.inputs, self.layer.k_conv, self.layer.v_conv, length, reach, backend="reference"
            )
        rows = (
            self._slots(each[batch], t, batch).to(self.heads.q.dtype) for each in (keys_from, values_from)
        )
        U, V = (self.mix(which, head, t, batch).T @ each for which, each in enumerate(rows, 1))
        return U, V

    def contributions(self, t: int, batch: int = 0) -> Tensor:
        """``[H, K, D]``: what every token adds to the output at a position; all together they are the output.

        Exact: given the active slots and the norm, a head is linear in its values.
        """
        weights = self.trace.weights_of_keys[batch, :, t]  # [H, K]
        parts = [
            self._read(weights[head, :, None] * self.heads.v[batch, :, head], head, t, batch)
            for head in range(self.config.num_heads)
        ]
        return torch.stack(parts)

    def contribution_sizes(self, batch: int = 0) -> Tensor:
        """``[H, T, K]``: the lengths of the contributions."""
        return torch.stack(
            [self.contributions(t, batch).norm(dim=-1) for t in range(self.inputs.shape[1])], dim=1
        )

    def _read(self, values: Tensor, head: int, t: int, batch: int) -> Tensor:
        """Through gate and W_o: ``[n, Dv] -> [n, D]``."""
        rows = slice(head * self.config.vo_dim, (head + 1) * self.config.vo_dim)
        gate = self.heads.output_gate
        return (values if gate is None else values * gate[batch, t, rows]) @ self.layer.o_proj.weight[
            :, rows
        ].T.to(values.dtype)

    def _slots(self, by_key: Tensor, t: int, batch: int) -> Tensor:
        """``[K, n] -> [slots, n]``: in slot order, those that exist at t."""
        order = self.key_of_slot
        return by_key[order[min(batch, len(order) - 1), t, : self.width(t, batch)]]


@torch.no_grad()
def capture(layer: nn.Module, x: Tensor, *, starts: Tensor | None = None) -> Capture:
    """Look at what ``layer(x, starts=starts)`` does.

    Example::

        seen = capture(HyperGLU(64, max_length=128), torch.randn(1, 20, 64))
        seen.active.sum(-1)                      # [1, heads, 20]: how many slots are active at each position
        seen.contributions(t=19).sum((0, 1))     # the layer's output there
    """
    if not isinstance(layer, Mixer):
        raise UserError(
            f"{type(layer).__name__} has no memory pool to look into; allowed: layers of a label, such as HyperGLU"
        )
    config = layer.config
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gates"):
        part = getattr(layer, name)
        if part is not None and not is_plain(part, nn.Linear):
            raise UserError(
                f"{name} has an adapter or hooks, and a capture reads its weights; merge the adapter, or remove the hooks"
            )
    layer._check(x, None, starts)
    if layer.registers is not None:
        if starts is not None:
            raise UserError(
                "a layer with registers is captured one whole sequence at a time, without padding, packing or starts"
            )
        x = torch.cat([layer.registers.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
    length, reach = x.shape[1], None
    if starts is not None:
        starts = row_starts(starts.long(), length, length, config.max_length)
        reach = torch.arange(1, length + 1, device=x.device) - starts
        x = x.masked_fill((reach < 1)[:, :, None], 0)
    heads = _in_float(layer.project(x, None, reach, starts))
    how: dict[str, Any] = {"activation": config.activation, "layout": config.layout, "eps": config.eps}
    found = trace(heads.q, heads.k, heads.v, heads.mix1, heads.mix2, starts, **how)
    gates: dict[str, Tensor] = {}
    if layer.gates is not None:
        parts = torch.sigmoid(layer.gates(x)).split(layer.gate_sizes, dim=-1)
        gates = {
            name: part
            for name, part in zip(("query", "output", "mix1", "mix2"), parts, strict=True)
            if part.shape[-1]
        }
    return Capture(layer, x, heads, found, gates, starts)


def _in_float(heads: Heads) -> Heads:
    """Half precision as the operator takes it: in float32."""

    def cast(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    mixes = [None if mix is None else Mix(*map(cast, mix)) for mix in (heads.mix1, heads.mix2)]
    gate = None if heads.output_gate is None else cast(heads.output_gate)
    return Heads(cast(heads.q), cast(heads.k), cast(heads.v), mixes[0], mixes[1], gate)


@torch.no_grad()
def capture_model(model: Any, input_ids: Tensor, **inputs: Any) -> list[Capture | None]:
    """A capture of every layer of a language model while it reads ``input_ids`` ``[B, T]``; None for a peer's layer."""
    seen: list[Capture | None] = []

    def look(mixer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        seen.append(
            capture(mixer, given[0], starts=named.get("starts")) if isinstance(mixer, Mixer) else None
        )

    blocks = model.model.layers
    hooks = [block.mixer.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    try:
        model(input_ids, use_cache=False, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
