"""A decoding step in one kernel: the whole layer, for a few new positions.

What the general path does in two dozen small operations costs more than the arithmetic when there is one new
position.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hypermlp.layers.gates import Gates
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.state import MixerState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import can_run
from hypermlp.ops.library import call, define, in_transform

if TYPE_CHECKING:
    from hypermlp.layers.mixer import Mixer

MAX_POSITIONS = 4  # of a sequence: the kernel takes them one by one
MAX_ROWS = 32  # of the batch: for more, ordinary matrix products are faster
NO_OFFSETS = (-1, -1, -1, -1)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS: dict[str, type] = {
    **dict.fromkeys(LINEAR, nn.Linear),
    "gates": Gates,
    "mix1": SequenceMix,
    "mix2": SequenceMix,
}

MIX_FIELDS = ("diag", "left", "right")
_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in MIX_FIELDS)
_SCHEMA = (
    "(Tensor x, Tensor(a!)? history, SymInt past_inputs, Tensor? k_conv, Tensor? v_conv, "
    "Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor o_weight, "
    "Tensor? gate_weight, Tensor? gate_bias, "
    "SymInt q_gate, SymInt output_gate, SymInt mix1_gate, SymInt mix2_gate, "
    f"Tensor(b!) keys, Tensor(c!) values, SymInt past, {_MIXES}, Tensor? starts, Tensor? reach, "
    "str activation, str layout, float eps) -> Tensor"
)


def _fake(x: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_native_step = define("native_step", _SCHEMA, _fake)


def steps_natively(layer: "Mixer", x: Tensor) -> bool:
    """Return True if the kernel can take these new positions.

    It computes no derivatives, rotates nothing, has neither registers nor a Canon layer, and reads parameters
    instead of calling modules, so these must be plain: adapters and hooks take the general path.
    """
    config, count = layer.config, x.shape[1]
    if (
        count > MAX_POSITIONS
        or x.shape[0] * count > MAX_ROWS
        or config.rope
        or config.num_registers
        or config.canon
    ):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
        return False
    if autocast_enabled(x.device.type) or modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    for name, kind in PARTS.items():
        part = layer._modules.get(name)
        if part is None:
            continue
        weight = part._parameters.get("weight")
        if not is_plain(part, kind) or (weight is not None and weight.dtype != x.dtype):
            return False
    mixed = config.mix1 or config.mix2
    return can_run(layer.backend, Request("step", x.device.type, x.dtype, config.activation, mixed))


def is_plain(part: nn.Module, kind: type) -> bool:
    """Return True if the module computes what its parameters say.

    It must be no adapter, have no hooks, and its ``forward`` must not be replaced (as accelerate does).
    """
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return type(part) is kind and not any(hooks) and "forward" not in vars(part)


def native_step(layer: "Mixer", x: Tensor, state: MixerState, visibility: Visibility) -> Tensor:
    """Compute ``layer.mix``; the state's rows are written in place and still have to be committed."""
    # Submodules and parameters are read from their dictionaries: attributes of nn.Module are slow.
    config, parts, own = layer.config, layer._modules, layer._parameters
    state.check_kind("keys", x)
    keys, _ = state.room("keys", x, (config.num_branches, config.qk_dim))
    values, past = state.room("values", x, (config.num_heads, config.vo_dim))
    history, past_inputs = None, 0
    if config.conv:
        history, past_inputs = state.room("inputs", x, x.shape[2:], needed=config.conv_kernel - 1)
    mixes: list[Tensor | None] = []
    for name in ("mix1", "mix2"):
        mix = parts.get(name)
        mixes += (None, None, None) if mix is None else (mix._parameters[field] for field in MIX_FIELDS)
    gates: Any = parts.get("gates")
    out: Tensor = call(
        _native_step,
        *(x, history, past_inputs, own.get("k_conv"), own.get("v_conv")),
        *(parts[name]._parameters["weight"] for name in LINEAR),  # type: ignore[union-attr]
        *((None, None, *NO_OFFSETS) if gates is None else (gates.weight, gates.bias, *gates.offsets)),
        *(keys, values, past, *mixes),
        *(visibility.starts_from(state.length - past), visibility.reach),
        *(config.activation, config.layout, config.eps),
    )
    # Autograd learns what was written, so that a backward that saved it refuses instead of being wrong.
    written = [cache for cache in (history, keys, values) if cache is not None and not cache.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out
