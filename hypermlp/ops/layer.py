"""A whole layer, or its decoding step, as one operator.

The general path of a layer is a chain of two dozen operators. Without a state, it is one operator with a
backward of its own, which keeps x, q, k, v, the gates, the head outputs and what attention keeps of its rows;
the backward recomputes the convolutions where it needs them, so that no gradient of an intermediate result is
stored. A decoding step is one operator too: with one new position, the chain costs more than the arithmetic.
``hypermlp.layers.fast`` decides when a layer takes them.

Shapes: B batch, T new positions, N = B * T, D hidden size, G score branches, H heads, Dk, Dv widths, W gates,
L slots, r rank, K taps, k registers.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops import reference
from hypermlp.ops.arguments import Attention, Mix, schema
from hypermlp.ops.convolution import reference_conv
from hypermlp.ops.library import call, define, register
from hypermlp.ops.native import kept_rows


class LayerWeights(NamedTuple):
    """The parameters and options of a layer, as the kernels read them."""

    k_conv: Tensor | None  # [D, K]
    v_conv: Tensor | None
    q_weight: Tensor  # [G * Dk, D]
    k_weight: Tensor
    v_weight: Tensor  # [H * Dv, D]
    o_weight: Tensor  # [D, H * Dv]
    gate_weight: Tensor | None  # [W, D]
    gate_bias: Tensor | None
    diag1: Tensor | None  # [G, L]; left and right [G, L, r]
    left1: Tensor | None
    right1: Tensor | None
    diag2: Tensor | None  # [H, L]; left and right [H, L, r]
    left2: Tensor | None
    right2: Tensor | None
    q_gate: int  # the first row of each gate in gate_weight, -1 if it is absent
    output_gate: int
    mix1_gate: int
    mix2_gate: int
    activation: str
    layout: str
    eps: float


class LayerArguments(NamedTuple):
    """The arguments of a whole layer."""

    x: Tensor  # [B, T, D]
    weights: LayerWeights
    starts: Tensor | None  # int64 [B, T]
    reach: Tensor | None  # int64 [B, T]
    heads: int
    keep: bool
    """Whether to return what the backward needs, after the output."""


class StepArguments(NamedTuple):
    """The arguments of a decoding step, which writes the new positions behind those of its caches."""

    x: Tensor
    weights: LayerWeights
    registers: Tensor | None  # [k, D]
    cos: Tensor | None  # [B or 1, T, 1 + k, Dk / 2]: of the new position, then of the registers it sees
    sin: Tensor | None
    history: Tensor | None  # [B, room, D], inputs; the first past_inputs rows are full
    past_inputs: int
    keys: Tensor  # [B, room, G, Dk], of which `past` rows are full
    values: Tensor  # [B, room, H, Dv]
    past: int
    starts: Tensor | None
    reach: Tensor | None


class RingStepArguments(NamedTuple):
    """The arguments of a decoding step on a state of fixed size, whose rings it writes."""

    x: Tensor  # [B, 1, D]
    weights: LayerWeights
    history: Tensor | None  # [B, rows, D]
    keys: Tensor  # [B, rows, G, Dk]
    values: Tensor  # [B, rows, H, Dv]
    past: Tensor  # int64 [], positions so far
    starts: Tensor | None
    reach: Tensor | None


def flattened(arguments: LayerArguments | StepArguments | RingStepArguments) -> tuple[Any, ...]:
    """Return the arguments in the order of the schema: x, then the weights one by one, then the rest."""
    return (arguments.x, *arguments.weights, *arguments[2:])


def _unflattened(kind: Any, flat: tuple[Any, ...]) -> Any:
    """Invert ``flattened``."""
    rest = 1 + len(LayerWeights._fields)
    return kind(flat[0], LayerWeights._make(flat[1:rest]), *flat[rest:])


def project(a: LayerArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v by heads, ``[B, T, heads, width]``, and the gates ``[B, T, W]``, by definition."""
    w, length = a.weights, a.x.shape[1]
    gates = a.x.new_empty(*a.x.shape[:2], 0)
    if w.gate_weight is not None:
        gates = torch.sigmoid(F.linear(a.x, w.gate_weight, w.gate_bias))
    from_x = [a.x, a.x]
    if w.k_conv is not None and w.v_conv is not None:
        from_x = reference_conv(a.x, [w.k_conv, w.v_conv], length, a.reach)
    q = F.linear(a.x, w.q_weight)
    if w.q_gate >= 0:
        q = q * gates[..., w.q_gate : w.q_gate + q.shape[2]]
    k, v = F.linear(from_x[0], w.k_weight), F.linear(from_x[1], w.v_weight)
    branches = a.heads * (2 if w.activation == "glu" else 1)
    return (
        q.unflatten(2, (branches, -1)),
        k.unflatten(2, (branches, -1)),
        v.unflatten(2, (a.heads, -1)),
        gates,
    )


def reference_layer(a: LayerArguments) -> Tensor:
    """Compute a whole layer by definition: what its operators must agree with."""
    w, (q, k, v, gates) = a.weights, project(a)

    def mix(column: int, heads: int, *parameters: Tensor | None) -> Mix | None:
        diag, left, right = parameters
        if diag is None or left is None or right is None:
            return None
        gate = gates[..., column : column + heads * left.shape[2]]
        return Mix(diag, left, right, gate.unflatten(2, (heads, -1)))

    mix1 = mix(w.mix1_gate, q.shape[2], w.diag1, w.left1, w.right1)
    mix2 = mix(w.mix2_gate, a.heads, w.diag2, w.left2, w.right2)
    o = reference.attention(Attention(q, k, v, mix1, mix2, a.starts, w.activation, w.layout, w.eps)).flatten(
        2
    )
    if w.output_gate >= 0:
        o = o * gates[..., w.output_gate : w.output_gate + o.shape[2]]
    return F.linear(o, w.o_weight)


def _fake_layer(*flat: Any) -> list[Tensor]:
    a: LayerArguments = _unflattened(LayerArguments, flat)
    out = a.x.new_empty(a.x.shape)
    if not a.keep:
        return [out]
    w, lead = a.weights, a.x.shape[:2]
    widths = [w.q_weight.shape[0], w.k_weight.shape[0], w.v_weight.shape[0]]
    gates = 0 if w.gate_weight is None else w.gate_weight.shape[0]
    kept = [a.x.new_empty(lead.numel(), width) for width in (*widths, gates, widths[2])]
    branches = a.heads * (2 if w.activation == "glu" else 1)
    q, k, v = (
        y.view(*lead, heads, -1) for y, heads in zip(kept, (branches, branches, a.heads), strict=False)
    )
    # The gate of a mix does not change what attention keeps.
    mix1, mix2 = (None if left is None else Mix(left, left, left, gate=left) for left in (w.left1, w.left2))
    rows = kept_rows(Attention(q, k, v, mix1, mix2, None, w.activation, w.layout, w.eps))
    return [out, *kept, rows]


def _fake_step(x: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_native_layer = register(
    "native_layer", schema(LayerArguments), "Tensor[]", _fake_layer, what="the layer", outputs=1
)
_native_step = define(
    "native_step",
    f"({schema(StepArguments, written=('history', 'keys', 'values'))}) -> Tensor",
    _fake_step,
)
_triton_step = define(
    "triton_step",
    f"({schema(RingStepArguments, written=('history', 'keys', 'values'))}) -> Tensor",
    _fake_step,
)


def _run_triton_step(*flat: Any) -> Tensor:
    from hypermlp.ops.triton.step import step

    return step(_unflattened(RingStepArguments, flat))


torch.library.impl("hypermlp::triton_step", "default", _run_triton_step)


def native_layer(arguments: LayerArguments) -> Tensor:
    """Compute a whole layer with the kernels of "native"."""
    out: Tensor = _native_layer(*flattened(arguments))[0]
    return out


def native_step(arguments: StepArguments) -> Tensor:
    """Compute a decoding step with the kernel of "native"."""
    out: Tensor = call(_native_step, *flattened(arguments))
    # Autograd learns what was written, so that a backward that saved it refuses instead of being wrong.
    caches = (arguments.history, arguments.keys, arguments.values)
    written = [cache for cache in caches if cache is not None and not cache.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out


def triton_step(arguments: RingStepArguments) -> Tensor:
    """Compute a decoding step on a state of fixed size with the kernels of "triton"."""
    out: Tensor = call(_triton_step, *flattened(arguments))
    return out
