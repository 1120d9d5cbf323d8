"""The layer: project, mix, read out. ``HyperMLP``, ``HyperGLU`` and every other label are one module with other switches.

Shapes: B batch, T new positions, D hidden size, H heads, G score branches (2 H for "glu"), Dk, Dv widths.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig, is_integer, require
from hypermlp.errors import UserError
from hypermlp.layers.common import causal_conv_pair, rotate
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.registers import add_overlap, attend_with_registers, conv_of_registers
from hypermlp.layers.state import MixerState
from hypermlp.layers.step import native_step, steps_natively
from hypermlp.ops.api import attend, autocast_enabled
from hypermlp.ops.layout import check_starts_form, row_starts
from hypermlp.ops.types import Mix


def positions_in_document(positions: Tensor, stream_starts: Tensor | None) -> Tensor:
    """Positions counted from a document's first, the last one that saw only itself. ``[T] -> [B or 1, T]``

    A gate on turned queries makes scores depend on more than distances, so neither padding nor packing may shift them.
    ``stream_starts``: ``[B, >= T]``, ``starts`` of the whole stream, or of ``positions`` alone if they are the whole.
    """
    if stream_starts is None:
        return positions[None]
    stream = torch.arange(stream_starts.shape[1], device=positions.device)
    origins = torch.where(stream_starts == stream, stream, 0).cummax(dim=1).values
    return positions - origins[:, -positions.shape[0] :]


class Heads(NamedTuple):
    """What the operator takes, and the gate on its output ``[B, T, H * Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mix1: Mix | None
    mix2: Mix | None
    output_gate: Tensor | None


class Mixer(nn.Module):
    """A sequence mixer, ``[B, T, D] -> [B, T, D]``, causal, in the place of attention.

    Example::

        layer = Mixer.from_label("R-cg-q-12o", hidden_size=768, max_length=1024)
        y = layer(x)
    """

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.config = config
        self.backend = "auto"
        hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
        self.q_proj = nn.Linear(hidden, qk, bias=False)
        self.k_proj = nn.Linear(hidden, qk, bias=False)
        self.v_proj = nn.Linear(hidden, vo, bias=False)
        self.o_proj = nn.Linear(vo, hidden, bias=False)
        self.k_conv = nn.Parameter(torch.empty(hidden, config.conv_kernel)) if config.conv else None
        self.v_conv = nn.Parameter(torch.empty(hidden, config.conv_kernel)) if config.conv else None
        self.mix1 = SequenceMix(config.num_branches, config.num_slots, config.rank) if config.mix1 else None
        self.mix2 = SequenceMix(config.num_heads, config.num_slots, config.rank) if config.mix2 else None
        self.registers = (
            nn.Parameter(torch.empty(config.num_registers, hidden)) if config.num_registers else None
        )
        # All sigmoid gates of x in one product: on the queries, on the head outputs, of the first and of the second mix.
        mix_gates = (
            config.num_branches * config.rank * config.mix1,
            config.num_heads * config.rank * config.mix2,
        )
        self.gate_sizes = [qk * config.feature_gates, vo * config.feature_gates, *mix_gates]
        self.gates = nn.Linear(hidden, sum(self.gate_sizes)) if any(self.gate_sizes) else None
        self.reset_parameters()

    @classmethod
    def from_label(cls, label: str, *, hidden_size: int, max_length: int, **settings: Any) -> "Mixer":
        """The layer of a label of the paper's design study; ``settings`` as in ``MixerConfig.from_label``."""
        return Mixer(
            MixerConfig.from_label(label, hidden_size=hidden_size, max_length=max_length, **settings)
        )

    def reset_parameters(self) -> None:
        """Weights N(0, init_std), biases and diagonals zero."""
        std = self.config.init_std
        for module in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gates):
            if module is not None:
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for weight in (self.k_conv, self.v_conv, self.registers):
            if weight is not None:
                nn.init.normal_(weight, std=std)
        for mix in (self.mix1, self.mix2):
            if mix is not None:
                mix.reset_parameters(std)

    def new_state(self, batch_size: int, *, rollback: int = 128) -> MixerState:
        """An empty decoding state. ``rollback``: how many positions ``crop`` may take back where there is a convolution."""
        require("batch_size", batch_size, is_integer(batch_size) and batch_size > 0, "a positive integer")
        require("rollback", rollback, is_integer(rollback) and rollback >= 0, "an integer, 0 or more")
        return MixerState(batch_size, self.config, rollback=rollback)

    def forward(self, x: Tensor, *, state: MixerState | None = None, starts: Tensor | None = None) -> Tensor:
        """Mix ``x``, ``[B, T, D]``.

        Args:
            state: from ``new_state``. ``x`` then continues what the state has seen, and the state takes it in: a whole prompt,
                a chunk or one token at a time give the same as everything at once.
            starts: int ``[B]`` or ``[B, T]``: the first position each new position sees, counted from the beginning of the
                stream. ``[B]`` for padding on the left, ``[B, T]`` for packed documents or a sliding window. Where a state is
                given and starts is not, the last one given before holds on.
        """
        config = self.config
        self._check(x, state, starts)
        past = 0 if state is None else state.length
        new, total = x.shape[1], past + x.shape[1]
        reach, stream_starts = None, None
        if starts is None and state is not None:
            starts = state.last_starts()
        if starts is not None:
            starts = starts.long()
            given = starts
            if state is not None and starts.dim() == 1:
                starts = starts.clamp(max=total)  # padding that goes on in a later chunk
            starts = row_starts(starts, new, total, config.max_length)  # [B, T]
            stream_starts = starts if state is None else state.offer_starts(given, new)
            reach = (
                torch.arange(past + 1, total + 1, device=x.device) - starts
            )  # how many positions each sees, itself included
            x = x.masked_fill(
                (reach < 1)[:, :, None], 0
            )  # padding: whatever stands there, even NaN, goes no further

        if state is not None and steps_natively(self, x):
            out = native_step(self, x, state, starts, reach)
            state.commit(new, stream_starts)
            return out
        register_inputs = self._register_inputs()
        q, k, v, mix1, mix2, output_gate = self.project(x, state, reach, stream_starts, register_inputs)
        operator = partial(
            attend, activation=config.activation, layout=config.layout, eps=config.eps, backend=self.backend
        )
        if register_inputs is None:
            o = operator(q, k, v, mix1, mix2, starts)
        else:
            keys, values = self._register_heads(*register_inputs)
            own_positions = self._own_positions(past, new, x.device, stream_starts)
            o = attend_with_registers(operator, q, k, v, mix1, mix2, keys, values, starts, own_positions)
        o = o.flatten(2)
        out = self.o_proj(o if output_gate is None else o * output_gate)
        if state is not None:
            state.commit(new, stream_starts)  # nothing can fail any more
        return out

    def project(
        self,
        x: Tensor,
        state: MixerState | None,
        reach: Tensor | None,
        stream_starts: Tensor | None,
        register_inputs: tuple[Tensor, Tensor] | None = None,
    ) -> Heads:
        """Everything that comes before the operator, and the gate that comes after it; ``reach``: how many positions each one sees.

        ``register_inputs``: of ``_register_inputs``, if registers stand before x.
        """
        config, past = self.config, 0 if state is None else state.length
        keys_from = values_from = x
        if self.k_conv is not None and self.v_conv is not None:
            extended = x if state is None else state.offer_inputs(x)
            keys_from, values_from = causal_conv_pair(
                extended, self.k_conv, self.v_conv, x.shape[1], reach, backend=self.backend
            )
            if register_inputs is not None:
                overlaps = (convolved[config.num_registers :] for convolved in register_inputs)
                keys_from, values_from = (
                    add_overlap(each, overlap, reach, past)
                    for each, overlap in zip((keys_from, values_from), overlaps, strict=True)
                )
        q = self.q_proj(x).unflatten(-1, (config.num_branches, config.qk_dim))
        k = self.k_proj(keys_from).unflatten(-1, (config.num_branches, config.qk_dim))
        v = self.v_proj(values_from).unflatten(-1, (config.num_heads, config.vo_dim))
        gates = None if self.gates is None else torch.sigmoid(self.gates(x))
        if config.rope:
            own_positions = self._own_positions(past, x.shape[1], x.device, stream_starts)
            if register_inputs is None:
                own_positions = own_positions - config.num_registers  # none stand before x
            q, k = (rotate(y, own_positions, config.rope_theta) for y in (q, k))
        if state is not None:
            k, v = state.offer(k, v)
        mix1 = mix2 = output_gate = None
        if gates is not None:
            q_gate, output_gate, gate1, gate2 = gates.split(self.gate_sizes, dim=-1)
            q = q * q_gate.unflatten(-1, q.shape[2:]) if config.feature_gates else q
            mix1 = None if self.mix1 is None else self.mix1(gate1)
            mix2 = None if self.mix2 is None else self.mix2(gate2)
        return Heads(q, k, v, mix1, mix2, output_gate if config.feature_gates else None)

    def _own_positions(
        self, past: int, new: int, device: torch.device, stream_starts: Tensor | None
    ) -> Tensor:
        """Of new positions in their documents, behind the registers: ``[B or 1, T]``."""
        return (
            positions_in_document(torch.arange(past, past + new, device=device), stream_starts)
            + self.config.num_registers
        )

    def _register_inputs(self) -> tuple[Tensor, Tensor] | None:
        """What the registers' keys and values are made from, and behind it what they add to the first positions of a context."""
        if self.registers is None or self.k_conv is None or self.v_conv is None:
            return None if self.registers is None else (self.registers, self.registers)
        return conv_of_registers(self.registers, self.k_conv, self.v_conv)

    def _register_heads(
        self, keys_from: Tensor, values_from: Tensor
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The registers' keys, by the position of the first one, and their values: layers/registers.py."""
        config, count = self.config, self.config.num_registers
        keys = self.k_proj(keys_from[:count]).unflatten(-1, (config.num_branches, config.qk_dim))
        values = self.v_proj(values_from[:count]).unflatten(-1, (config.num_heads, config.vo_dim))

        def keys_at(first: Tensor) -> Tensor:
            rows = keys.expand(first.shape[0], -1, -1, -1)
            return (
                rotate(rows, first[:, None] + torch.arange(count, device=first.device), config.rope_theta)
                if config.rope
                else rows
            )

        return keys_at, values

    def _check(self, x: Tensor, state: MixerState | None, starts: Tensor | None) -> None:
        weight, max_length = (
            getattr(self.q_proj, "weight", x),
            self.config.max_length,
        )  # an adapter may have none
        weight = weight if isinstance(weight, Tensor) else x
        require("x", type(x), isinstance(x, Tensor), "a tensor")
        if x.dim() != 3 or x.shape[-1] != self.config.hidden_size or 0 in x.shape:
            raise UserError(
                f"x has shape {list(x.shape)}; it must be [batch, positions, {self.config.hidden_size}], none empty"
            )
        if x.device != weight.device:
            raise UserError(f"x is on {x.device}, the layer on {weight.device}; move one of them")
        if x.dtype != weight.dtype and weight.is_floating_point() and not autocast_enabled(x.device.type):
            raise UserError(
                f"x is {x.dtype}, the layer {weight.dtype}; cast one of them, or use torch.autocast"
            )
        if state is not None and state.config != self.config:
            raise UserError(
                f"the state belongs to a layer with another configuration, {state.config}; this one has {self.config}"
            )
        if state is not None and state.batch_size != x.shape[0]:
            raise UserError(
                f"x has batch size {x.shape[0]}, the state {state.batch_size}; make one with new_state(batch_size={x.shape[0]})"
            )
        if state is not None:
            state.check_inputs(x)
        if starts is not None:
            check_starts_form(starts, x)
        total = x.shape[1] + (0 if state is None else state.length)
        windowed = starts is not None or (state is not None and state.starts is not None)
        if total > max_length and not windowed:
            raise UserError(
                f"{total} positions, but max_length is {max_length}; build the layer with a larger max_length, "
                f"or pass starts so that each position sees at most {max_length} (a sliding window)"
            )

    def extra_repr(self) -> str:
        c = self.config
        said = f"activation={c.activation!r}, num_heads={c.num_heads}, max_length={c.max_length}, layout={c.layout!r}, rope={c.rope}"
        return said + (f", num_registers={c.num_registers}" if c.num_registers else "")


class HyperMLP(Mixer):
    """Label ``R-cg-q-12o``: relu of the normalised, mixed scores. ``settings``: any field of ``MixerConfig``, or ``compression``."""

    def __init__(self, hidden_size: int, max_length: int, **settings: Any):
        super().__init__(
            MixerConfig.from_label("R-cg-q-12o", hidden_size=hidden_size, max_length=max_length, **settings)
        )


class HyperGLU(Mixer):
    """Label ``G-cg-q-12o``: like HyperMLP, with a second score branch for the strength of a slot beside its selection."""

    def __init__(self, hidden_size: int, max_length: int, **settings: Any):
        super().__init__(
            MixerConfig.from_label("G-cg-q-12o", hidden_size=hidden_size, max_length=max_length, **settings)
        )
