"""A decoding step in one kernel: the whole layer, for a few new positions.

What the general path does in two dozen small operations costs more than the arithmetic when there is one new
position.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hypermlp.config import MixerConfig
from hypermlp.layers.gates import Gates
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.rotary import Rope, angles
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
WEIGHTS: dict[type, str] = {nn.Linear: "weight", Gates: "weight", SequenceMix: "left"}
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (nn.Linear, Gates, SequenceMix)}
MIX_FIELDS = ("diag", "left", "right")
_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in MIX_FIELDS)
_SCHEMA = (
    "(Tensor x, Tensor(a!)? history, SymInt past_inputs, Tensor? k_conv, Tensor? v_conv, "
    "Tensor? registers, Tensor? cos, Tensor? sin, "
    "Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor o_weight, "
    "Tensor? gate_weight, Tensor? gate_bias, "
    "SymInt q_gate, SymInt output_gate, SymInt mix1_gate, SymInt mix2_gate, "
    f"Tensor(b!) keys, Tensor(c!) values, SymInt past, {_MIXES}, Tensor? starts, Tensor? reach, "
    "str activation, str layout, float eps) -> Tensor"
)


def _fake(x: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_native_step = define("native_decoding_step", _SCHEMA, _fake)


def steps_natively(layer: "Mixer", x: Tensor) -> bool:
    """Return True if the kernel can take these new positions.

    It computes no derivatives, has no Canon layer, and reads parameters instead of calling modules, so these
    must be plain: adapters and hooks take the general path.
    """
    config, count = layer.config, x.shape[1]
    if count > MAX_POSITIONS or x.shape[0] * count > MAX_ROWS or config.canon:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
        return False
    if autocast_enabled(x.device.type) or modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return False
    dtype, parts, own = x.dtype, layer._modules, layer._parameters
    if config.conv and not (_has_dtype(own, "k_conv", dtype) and _has_dtype(own, "v_conv", dtype)):
        return False
    if config.num_registers and not _has_dtype(own, "registers", dtype):
        return False
    for name, kind in PARTS.items():
        part = parts.get(name)
        if part is not None and not (
            is_plain(part, kind) and _has_dtype(part._parameters, WEIGHTS[kind], dtype)
        ):
            return False
    mixed = config.mix1 or config.mix2
    return can_run(layer.backend, Request("step", x.device.type, x.dtype, config.activation, mixed))


def _has_dtype(parameters: dict[str, Any], name: str, dtype: torch.dtype) -> bool:
    """Return True if there is such a parameter; other tools may replace it by something else."""
    parameter = parameters.get(name)
    return parameter is not None and parameter.dtype == dtype


def is_plain(part: nn.Module, kind: type) -> bool:
    """Return True if the module computes what its parameters say.

    It must be no adapter, have no hooks, and its ``forward`` must not be replaced, neither on the module (as
    accelerate does) nor on its class.
    """
    return (
        type(part) is kind
        and not (part._forward_hooks or part._forward_pre_hooks)
        and not (part._backward_hooks or part._backward_pre_hooks)
        and "forward" not in part.__dict__
        and kind.forward is _FORWARDS[kind]
    )


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
        *(x, history, past_inputs, own.get("k_conv"), own.get("v_conv"), own.get("registers")),
        *(_angles(config, x.dtype, visibility) if config.rope else (None, None)),
        *(parts[name]._parameters["weight"] for name in LINEAR),  # type: ignore[union-attr]
        *((None, None, *NO_OFFSETS) if gates is None else (*gates._parameters.values(), *gates.offsets)),
        *(keys, values, past, *mixes),
        *(visibility.starts_from(state.length - past), visibility.reach),
        *(config.activation, config.layout, config.eps),
    )
    # Autograd learns what was written, so that a backward that saved it refuses instead of being wrong.
    written = [cache for cache in (history, keys, values) if cache is not None and not cache.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out


def _angles(config: MixerConfig, dtype: torch.dtype, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """Return cos and sin for the new positions and the registers that they see, ``[B or 1, T, 1 + k, ...]``.

    The registers of a context end just before its first position.
    """
    own, count = visibility.positions(), config.num_registers
    positions = own[:, :, None] + count
    if count:
        reach = visibility.stream() + 1 if visibility.reach is None else visibility.reach
        first = (own + 1 - reach)[:, :, None]
        positions = torch.cat([positions.expand(len(first), -1, -1), first + torch.arange(count)], dim=2)
    dtype = torch.promote_types(dtype, torch.float32)
    return angles(positions, config.qk_dim, Rope.of(config), dtype)
