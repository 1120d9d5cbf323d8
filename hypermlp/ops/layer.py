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
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix, schema
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
