"""The layer: project, mix, read out. All labels, HyperMLP and HyperGLU among them, are one module.

Shapes: B batch, T new positions, D hidden size, H heads, G score branches (2 H for "glu"), Dk, Dv widths.
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.canon import Canon
from hypermlp.layers.fast import fast_path
from hypermlp.layers.gates import Gates, GateValues, gate_shapes
from hypermlp.layers.initialization import initialize_
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.plain import is_plain
from hypermlp.layers.registers import (
    ProjectedRegisters,
    add_overlap,
    attend_with_registers,
    conv_of_registers,
)
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.state import DecodingState, MixerState
from hypermlp.layers.static_state import StaticState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import attend, attend_ring, causal_conv
from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.dispatch import find_backend
from hypermlp.ops.gating import Gating


class Projected(NamedTuple):
    """What a layer computes before the operator."""

    arguments: Attention
    gates: GateValues


class Mixer(SequenceMixer):
    """A sequence mixer: any variant of the paper's design study (a label, see ``hypermlp.label``).

    A causal layer ``[B, T, D] -> [B, T, D]`` in the place of attention: B sequences, T positions, D =
    ``hidden_size``. For each head at position t, which sees the n rows X ``[n, D]`` of its context, in slot
    order (newest first in layout "lag", oldest first in "forward")::

        q = rope(x_t W_q) * sigmoid(x_t W + b)     K = rope(conv(X) W_k)     V = conv(X) W_v
        h = (q Kᵀ) R1(x_t)                         scores, mixed along the sequence
        a = relu(h / sqrt(‖h‖² + eps))                                       "relu"
          = softplus(h_scale) * relu(h_gate / sqrt(‖h_gate‖² + eps))         "glu"
          = softmax(h / sqrt(qk_dim))                                        "softmax"
        o = (a R2(x_t)ᵀ V) * sigmoid(x_t W + b)    mixed back, read out, gated
        y = o W_o                                  summed over the heads

    where ``R(x) = I + Diag(diag) + left Diag(sigmoid(x W + b)) rightᵀ`` is ``[n, n]``, with the first n rows
    of the learned diag ``[num_slots]``, left and right ``[num_slots, rank]``, and with W ``[D, rank]``, b
    ``[rank]``. Every gate has its own W and b; the feature gates have one output for each channel of q and o.
    A head of "glu" has two branches, h_gate and h_scale, each with its own q, K and R1; otherwise it has one.
    R2, V and the output gate belong to the head. The convolutions act on each channel of the inputs along
    time, before the rows are put in slot order, one for keys and one for values. The configuration switches
    each part on or off; ``MixerConfig`` describes registers and Canon layers, which are not in the formula.

    Args:
        config: every switch, as ``MixerConfig`` documents them. ``Mixer.from_label`` builds one from a label.

    Attributes:
        config: the ``MixerConfig``.
        backend: the backend of the operator and the convolution: "auto" (the default), or a name from
            ``hypermlp.ops.available_backends()``. Assign it after construction; the next call checks it.
        recurrent, undecayed, state_class: for models and training; see
            ``hypermlp.layers.base.SequenceMixer``.

    Example::

        import torch
        from hypermlp import Mixer, MixerConfig

        layer = Mixer(MixerConfig(hidden_size=64, max_length=128, mix2=False))
        layer = Mixer.from_label("R-cg-q-12o", hidden_size=64, max_length=128)
        layer.backend = "reference"
        y = layer(torch.randn(2, 32, 64))  # [2, 32, 64]
    """

    state_class: ClassVar[type[DecodingState]] = MixerState
    config: MixerConfig

    def __init__(self, config: MixerConfig):
        super().__init__(config)
        hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
        self.q_proj = nn.Linear(hidden, qk, bias=False)
        self.k_proj = nn.Linear(hidden, qk, bias=False)
        self.v_proj = nn.Linear(hidden, vo, bias=False)
        self.o_proj: nn.Linear = nn.Linear(vo, hidden, bias=False)
        self.k_conv = nn.Parameter(torch.empty(hidden, config.conv_kernel)) if config.conv else None
        self.v_conv = nn.Parameter(torch.empty(hidden, config.conv_kernel)) if config.conv else None
        self.mix1 = SequenceMix(config.num_branches, config.num_slots, config.rank) if config.mix1 else None
        self.mix2 = SequenceMix(config.num_heads, config.num_slots, config.rank) if config.mix2 else None
        self.registers = (
            nn.Parameter(torch.empty(config.num_registers, hidden)) if config.num_registers else None
        )
        self.gates = Gates(config) if gate_shapes(config) else None
        self.canon = Canon(2 * qk + vo) if config.canon else None
        self.reset_parameters()

    @classmethod
    def from_label(cls, label: str, *, hidden_size: int, max_length: int, **settings: Any) -> "Mixer":
        """Build the layer of a label of the paper's design study, such as "R-cg-q-12o"; always a ``Mixer``.

        ``settings`` are what a label leaves open: compression (4), num_heads (2), rank (16), conv_kernel (4),
        num_registers (0), canon (False), sliding_window (None), rope_theta (10,000) and the other names that
        begin with ``rope_``, eps (1e-12), init_std (0.02), qk_width and vo_width. ``MixerConfig.from_label``
        documents them and what raises.
        """
        return Mixer(
            MixerConfig.from_label(label, hidden_size=hidden_size, max_length=max_length, **settings)
        )

    @property
    def max_visible(self) -> int | None:
        """The most positions that one position may see, registers not counted: ``config.max_length``.

        None with a sliding window, which limits it by itself.
        """
        return self.config.max_length if self.window is None else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give all parameters new initial values.

        Weights are normally distributed with mean 0 and standard deviation ``config.init_std``; biases and
        diagonals are zero; a Canon layer has PyTorch's initial values of a convolution.
        """
        linear = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        for module in (*linear, self.gates, self, self.mix1, self.mix2, self.canon):
            if module is not None:
                initialize_(module, self.config.init_std)

    def initialize_parameters(self, init: Any, std: float) -> None:
        """Set the convolutions and registers; see ``SequenceMixer.initialize_parameters``."""
        for weight in (self.k_conv, self.v_conv, self.registers):
            if weight is not None:
                init.normal_(weight, std=std)

    def resize_(self, config: MixerConfig, method: str) -> None:
        super().resize_(config, method)
        for mix in (self.mix1, self.mix2):
            if mix is not None:
                mix.resize_(config.num_slots, method)

    def new_static_state(self, batch_size: int, *, rollback: int, capacity: int) -> StaticState:
        refused = {"num_registers": self.config.num_registers, "canon": self.config.canon}
        for name, value in refused.items():
            if value:
                raise UserError(
                    f"capacity is {capacity}, but a layer with {name}={value} has no decoding state of fixed "
                    "size; leave capacity out"
                )
        settings: dict[str, Any] = {"rollback": rollback, "window": self.window}
        return StaticState(batch_size, self.config, capacity=capacity, **settings)

    def mix(self, x: Tensor, state: MixerState | None, visibility: Visibility) -> Tensor:
        """Mix ``x``, whose padding is zero. ``forward`` calls it; call the layer instead."""
        run = fast_path(self, x, state, visibility)
        return self._mix_by_modules(x, state, visibility) if run is None else run()

    def _mix_by_modules(self, x: Tensor, state: MixerState | None, visibility: Visibility) -> Tensor:
        """The general path: the formula, module by module."""
        registers = self._projected_registers()
        arguments, gates = self.project(x, state, visibility, registers)
        operator = partial(attend, backend=self.backend, window=visibility.window)
        if visibility.in_ring:
            operator = partial(attend_ring, positions=visibility.stream(), backend=self.backend)
        if registers is None:
            o = operator(arguments)
        else:
            positions = visibility.positions() + self.config.num_registers
            o = attend_with_registers(operator, arguments, registers, positions)
        o = o.flatten(2)
        out: Tensor = self.o_proj(self._gate_output(o, gates.output))
        return out

    def project(
        self,
        x: Tensor,
        state: MixerState | None,
        visibility: Visibility,
        registers: ProjectedRegisters | None = None,
    ) -> Projected:
        """Compute everything that comes before the operator (internal; ``hypermlp.inspect`` uses it).

        ``registers``: the registers that precede x; None if there are none.
        """
        config = self.config
        keys_from = values_from = x
        if self.k_conv is not None and self.v_conv is not None:
            keys_from, values_from = causal_conv(
                x if state is None else state.with_history("inputs", x, config.conv_kernel - 1),
                (self.k_conv, self.v_conv),
                x.shape[1],
                visibility.reach,
                backend=self.backend,
                required=False,
            )
            if registers is not None and registers.overlaps is not None:
                keys_from, values_from = (
                    add_overlap(rows, overlap, visibility.reach, visibility.known_past)
                    for rows, overlap in zip((keys_from, values_from), registers.overlaps, strict=True)
                )
        q = self.q_proj(x).unflatten(-1, (config.num_branches, config.qk_dim))
        k, v = self._keys(keys_from), self._values(values_from)
        if self.canon is not None:
            q, k, v = self._convolved(q, k, v, state, visibility)
        if config.rope:
            positions = visibility.positions() + (0 if registers is None else config.num_registers)
            q, k = (rotate(y, positions, Rope.of(config)) for y in (q, k))
        q, gates = self._gate(x, q)
        if state is not None:
            state.check_kind("keys", k)
            state.check_kind("values", v)
            k, v = state.extended("keys", k), state.extended("values", v)
        mix1 = None if self.mix1 is None else self.mix1(gates.mix1)
        mix2 = None if self.mix2 is None else self.mix2(gates.mix2)
        settings = config.activation, config.layout, config.eps
        k, v, starts = visibility.operands(k, v)
        return Projected(Attention(q, k, v, mix1, mix2, starts, *settings), gates)

    def _gate(self, x: Tensor, q: Tensor) -> tuple[Tensor, GateValues]:
        """Return the gated queries, and all gates."""
        if self.gates is None:
            return q, GateValues()
        gating = self._gating(q)
        if gating is not None and is_plain(self.gates, Gates):
            return self.gates.fused(x, q, gating)
        gates: GateValues = self.gates(x)
        return q if gates.query is None else q * gates.query, gates

    def _gating(self, like: Tensor) -> Gating | None:
        """Return the fused gates of the backend, if it has them."""
        backend = find_backend(self.backend, Request("gating", like.device.type, like.dtype))
        return None if backend is None else backend.gating

    def _gate_output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """``o``: ``[B, T, H * Dv]``."""
        if gate is None:
            return o
        gating = self._gating(o)
        return o * gate if gating is None or gate.dtype != o.dtype else gating.gate_output(o, gate)

    def _convolved(
        self, q: Tensor, k: Tensor, v: Tensor, state: MixerState | None, visibility: Visibility
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the Canon layer to queries, keys and values."""
        assert self.canon is not None
        flat = [y.flatten(2) for y in (q, k, v)]
        out = self.canon(torch.cat(flat, dim=-1), visibility, state, backend=self.backend)
        q_out, k_out, v_out = out.split([y.shape[-1] for y in flat], dim=-1)
        return q_out.view_as(q), k_out.view_as(k), v_out.view_as(v)

    def _keys(self, rows: Tensor) -> Tensor:
        return self.k_proj(rows).unflatten(-1, (self.config.num_branches, self.config.qk_dim))

    def _values(self, rows: Tensor) -> Tensor:
        return self.v_proj(rows).unflatten(-1, (self.config.num_heads, self.config.vo_dim))

    def _projected_registers(self) -> ProjectedRegisters | None:
        if self.registers is None:
            return None
        count, overlaps = self.config.num_registers, None
        keys_from: Tensor = self.registers
        values_from: Tensor = self.registers
        if self.k_conv is not None and self.v_conv is not None:
            keys_from, values_from = conv_of_registers(self.registers, self.k_conv, self.v_conv)
            overlaps = keys_from[count:], values_from[count:]
        rope = Rope.of(self.config) if self.config.rope else None
        return ProjectedRegisters(
            self._keys(keys_from[:count]), self._values(values_from[:count]), overlaps, rope
        )

    def _check(self, x: Tensor, state: DecodingState | None, starts: Tensor | None) -> None:
        super()._check(x, state, starts)
        if state is not None:
            state.check_kind("inputs", x)

    def _check_visibility(self, visibility: Visibility, state: DecodingState | None) -> None:
        longest = self.config.max_length
        if visibility.in_ring or visibility.first_visible is not None or self.window is not None:
            return  # Visibility has checked it
        total = visibility.known_past + visibility.new
        if total > longest:
            raise UserError(
                f"{total} positions, but max_length is {longest}; build the layer with a larger max_length "
                "(model.extend_context for a model) or with a sliding_window, or pass starts so that each "
                f"position sees at most {longest}"
            )

    def extra_repr(self) -> str:
        names = ["activation", "num_heads", "max_length", "layout", "rope"]
        names += [name for name in ("num_registers", "sliding_window") if getattr(self.config, name)]
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in names)
