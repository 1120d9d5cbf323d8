"""A step of decoding in one kernel: the whole layer, for a few new positions.

What ``Mixer.forward`` does in two dozen small operations costs more than the arithmetic when there is one new position.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.state import MixerState
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.backends import choose_backend
from hypermlp.ops.library import call, define, in_transform

if TYPE_CHECKING:
    from hypermlp.layers.mixer import Mixer

MOST_POSITIONS = 4  # of a sequence: the kernel takes them one by one
MOST_ROWS = 32  # of the batch: for more, ordinary matrix products are faster

_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in ("diag", "left", "right"))
_SCHEMA = (
    "(Tensor x, Tensor(a!)? history, SymInt past_inputs, Tensor? k_conv, Tensor? v_conv, "
    "Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor o_weight, Tensor? gate_weight, Tensor? gate_bias, "
    f"Tensor(b!) keys, Tensor(c!) values, SymInt past, {_MIXES}, Tensor? starts, Tensor? reach, "
    "str activation, str layout, float eps) -> Tensor"
)


def _fake(x: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_native_step = define("native_step", _SCHEMA, _fake)


def steps_natively(layer: "Mixer", x: Tensor) -> bool:
    """Can the kernel take these new positions?

    It computes no derivatives, rotates nothing, knows neither half precision nor registers, and reads parameters instead of calling
    modules, so these must be plain: adapters and hooks take the general way.
    """
    config, count = layer.config, x.shape[1]
    if (
        count > MOST_POSITIONS
        or x.shape[0] * count > MOST_ROWS
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
    ):
        return False
    if (
        x.dtype not in (torch.float32, torch.float64)
        or config.rope
        or config.activation == "softmax"
        or config.num_registers
    ):
        return False
    if (
        autocast_enabled(x.device.type)
        or in_transform()
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
    ):
        return False
    linear = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gates)
    if not all(
        is_plain(part, nn.Linear) and part.weight.dtype == x.dtype for part in linear if part is not None
    ):
        return False
    if not all(is_plain(mix, SequenceMix) for mix in (layer.mix1, layer.mix2) if mix is not None):
        return False
    return choose_backend(layer.backend, x.device.type, config.activation) == "native"


def is_plain(part: nn.Module, kind: type) -> bool:
    """Does it compute what its parameters say, and nothing else? Adapters and hooks do not."""
    return type(part) is kind and not part._forward_hooks and not part._forward_pre_hooks


def native_step(
    layer: "Mixer", x: Tensor, state: MixerState, starts: Tensor | None, reach: Tensor | None
) -> Tensor:
    """``layer(x, state=state)``; the state's caches take in the new positions, which are still to be committed."""
    config, gates = layer.config, layer.gates
    keys, values = state.caches(x)
    history, past_inputs = state.input_cache(x) if config.conv else (None, 0)
    parameters = [
        (None, None, None) if mix is None else (mix.diag, mix.left, mix.right)
        for mix in (layer.mix1, layer.mix2)
    ]
    out: Tensor = call(
        _native_step,
        *(x, history, past_inputs, layer.k_conv, layer.v_conv),
        *(layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.o_proj.weight),
        *((None, None) if gates is None else (gates.weight, gates.bias)),
        *(keys, values, state.length, *parameters[0], *parameters[1]),
        *(starts, reach, config.activation, config.layout, config.eps),
    )
    # Let autograd know what was written, so that a backward that saved it refuses instead of being wrong.
    written = [cache for cache in (history, keys, values) if cache is not None and not cache.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out
