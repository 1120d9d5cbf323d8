"""What a layer computes for an input: its memory, instantiated and activated, step by step.

A capture calls the layer's own projections and the operator's definition. The layer is not changed.

Shapes: B batch, T positions, D hidden size, H heads, S slots (as many as positions), K keys (as many as
positions).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig, require
from hypermlp.errors import UserError
from hypermlp.inspect.internals import convolved, kernels, operands, rotated
from hypermlp.layers.mixer import Mixer
from hypermlp.ops.arguments import Attention
from hypermlp.ops.layout import slot_maps
from hypermlp.ops.reference import Trace, trace


@dataclass(frozen=True)
class Capture:
    """One layer and one input, which ``capture`` returns.

    Positions and slots count from 0; in layout "lag" slot i of position t is key t - i. Registers are the
    first ``config.num_registers`` positions.
    """

    layer: Mixer
    inputs: Tensor
    """``[B, T, D]``: the input, behind the registers, with zeros in place of padding."""
    heads: Attention
    """The arguments of the operator: gated and rotated queries, keys, values, mixes, and ``starts``."""
    trace: Trace
    """Scores, pre-activations, activations and weights, in slot order."""
    gates: dict[str, Tensor]
    """The sigmoid gates ``[B, T, ...]`` that the layer has: "query", "output", "mix1", "mix2"."""

    @property
    def config(self) -> MixerConfig:
        return self.layer.config

    @property
    def starts(self) -> Tensor | None:
        """``[B, T]``: the first position that each position sees; None for the first of all."""
        return self.heads.starts

    @property
    def active(self) -> Tensor:
        """bool ``[B, H, T, S]``: the activated memory."""
        if self.config.activation == "softmax":
            return self.trace.exists.expand(self.trace.activation.shape)
        return self.trace.pre_activation[:, : self.config.num_heads] > 0

    @property
    def rho(self) -> Tensor:
        """``[B, H, T]``: the norm that divides the pre-activations."""
        gate = self.trace.pre_activation[:, : self.config.num_heads]
        return (gate.square().sum(-1) + self.config.eps).sqrt()

    @property
    def key_of_slot(self) -> Tensor:
        """int64 ``[B or 1, T, S]``: the key in each slot; meaningful where the slot exists."""
        length = self.inputs.shape[1]
        return slot_maps(self.config.layout, self.starts, length, length, self.inputs.device)[0]

    def width(self, t: int, batch: int = 0) -> int:
        """Return the number of slots at position t."""
        return int(_of_batch(self.trace.exists, batch)[0, t].sum())

    def by_slot(self, by_key: Tensor, t: int, batch: int = 0) -> Tensor:
        """Reorder rows ``[K, n]`` into the slots that exist at position t, ``[slots, n]``."""
        return by_key[_of_batch(self.key_of_slot, batch)[t, : self.width(t, batch)]]

    def mix(self, which: int, index: int, t: int, batch: int = 0) -> Tensor:
        """Return R ``[slots, slots]`` at position t; the identity where there is no mix.

        Args:
            which: 1 for the first mix, 2 for the second.
            index: the branch (first mix) or head (second mix).
        """
        require("which", which, which in (1, 2), "1 or 2")
        slots = self.width(t, batch)
        identity = torch.eye(slots, dtype=self.heads.q.dtype, device=self.inputs.device)
        mix = kernels((self.heads.mix1, self.heads.mix2)[which - 1], index, slots, batch)
        return identity if mix is None else identity + mix.added(t)

    def address(self, branch: int, t: int, batch: int = 0) -> Tensor:
        """Return W_q of a branch ``[D, Dk]``, rotated to position t but not gated."""
        rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
        weight = self.layer.q_proj.weight[rows].T.to(self.heads.q.dtype)
        return rotated(self.layer, weight, t, None if self.starts is None else self.starts[batch])

    def first_layer(self, branch: int, t: int, batch: int = 0) -> Tensor:
        """Return W1 ``[D, slots]``, for which ``x[t] @ W1`` is the pre-activation."""
        address = self.address(branch, t, batch)
        if "query" in self.gates:
            rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
            address = address * self.gates["query"][batch, t, rows]
        keys = self.by_slot(self.heads.k[batch, :, branch], t, batch)
        return address @ keys.T @ self.mix(1, branch, t, batch)

    def second_layer(self, head: int, t: int, batch: int = 0) -> Tensor:
        """Return W2 ``[slots, D]``, for which ``activation @ W2``, summed over heads, is the output."""
        values = self.by_slot(self.heads.v[batch, :, head], t, batch)
        return self.read_out(self.mix(2, head, t, batch).T @ values, head, t, batch)

    def pool(self, head: int, t: int, batch: int = 0) -> tuple[Tensor, Tensor]:
        """Return the memory slots U and V ``[slots, D]``: combinations of the context's convolved rows."""
        rows = convolved(self.layer, self.inputs, self.starts)
        slots = (self.by_slot(each[batch], t, batch).to(self.heads.q.dtype) for each in rows)
        U, V = (self.mix(which, head, t, batch).T @ each for which, each in enumerate(slots, 1))
        return U, V

    def contributions(self, t: int, batch: int = 0) -> Tensor:
        """Return what every token adds to the output at position t, ``[H, K, D]``; the sum is the output.

        The contributions are exact: given the active slots and the norm, a head is linear in its values.
        """
        weighted = self.trace.weights_of_keys[batch, :, t, :, None] * self.heads.v[batch].transpose(0, 1)
        return torch.stack([self.read_out(values, head, t, batch) for head, values in enumerate(weighted)])

    def contribution_sizes(self, batch: int = 0) -> Tensor:
        """Return the lengths of the contributions, ``[H, T, K]``."""
        steps = range(self.inputs.shape[1])
        return torch.stack([self.contributions(t, batch).norm(dim=-1) for t in steps], dim=1)

    def read_out(self, values: Tensor, head: int, t: int, batch: int = 0) -> Tensor:
        """Pass ``values`` ``[n, Dv]`` through the output gate at position t and W_o, ``[n, D]``."""
        rows = slice(head * self.config.vo_dim, (head + 1) * self.config.vo_dim)
        gate = self.gates.get("output")
        gated = values if gate is None else values * gate[batch, t, rows]
        return gated @ self.layer.o_proj.weight[:, rows].T.to(values.dtype)


def _of_batch(x: Tensor, batch: int) -> Tensor:
    """Return the entry of a batch element in a tensor ``[B or 1, ...]``."""
    return x[min(batch, len(x) - 1)]


@torch.no_grad()
def capture(layer: nn.Module, x: Tensor, *, starts: Tensor | None = None) -> Capture:
    """Compute ``layer(x, starts=starts)`` and return every intermediate result.

    Args:
        layer: a layer of a label, such as ``HyperGLU``; a baseline has no memory pool and raises.
        x: ``[B, T, D]``.
        starts: as for the layer.

    Example::

        seen = capture(HyperGLU(64, max_length=128), torch.randn(1, 20, 64))
        seen.active.sum(-1)                      # [1, heads, 20]: the number of active slots at each position
        seen.contributions(t=19).sum((0, 1))     # the layer's output at position 19
    """
    if not isinstance(layer, Mixer):
        raise UserError(
            f"{type(layer).__name__} has no memory pool; allowed: a layer of a label, such as HyperGLU"
        )
    inputs, arguments, gates = operands(layer, x, starts)
    return Capture(layer, inputs, arguments, trace(arguments), gates)


@torch.no_grad()
def capture_model(model: Any, input_ids: Tensor, **inputs: Any) -> list[Capture | None]:
    """Capture every layer of a language model while it reads ``input_ids`` ``[B, T]``.

    Returns a capture for each layer, None for a baseline. ``inputs`` are further arguments of the model.
    """
    seen: list[Capture | None] = []

    def look(mixer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        starts = named["visibility"].starts
        seen.append(capture(mixer, given[0], starts=starts) if isinstance(mixer, Mixer) else None)

    hooks = [block.mixer.register_forward_pre_hook(look, with_kwargs=True) for block in model.model.layers]
    try:
        model(input_ids, use_cache=False, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
