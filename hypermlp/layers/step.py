"""A decoding step in one kernel: the whole layer, for a few new positions.

With one new position, the two dozen small operations of ``Mixer.forward`` cost more than their arithmetic.
"""

from itertools import accumulate
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

MOST_POSITIONS = 4  # new positions per sequence; the kernel takes them one by one
MOST_ROWS = 32  # new positions in the whole batch; ordinary matrix products are faster for more

_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in ("diag", "left", "right"))
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
    """Return True if the kernel can process the new positions ``x``.

    The kernel computes no derivatives and supports neither RoPE, softmax, registers, half precision nor
    autocast. It reads parameters instead of calling modules, so layers with adapters or hooks take the
    general path.
    """
    config, (batch, positions, _) = layer.config, x.shape
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.gates)
    return (
        not (torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform())
        and positions <= MOST_POSITIONS
        and batch * positions <= MOST_ROWS
        and x.dtype in (torch.float32, torch.float64)
        and not (config.rope or config.activation == "softmax" or config.num_registers)
        and not (modules._global_forward_hooks or modules._global_forward_pre_hooks)
        and not autocast_enabled(x.device.type)
        and all(is_plain(p, nn.Linear) and p.weight.dtype == x.dtype for p in projections if p is not None)
        and all(is_plain(mix, SequenceMix) for mix in (layer.mix1, layer.mix2) if mix is not None)
        and choose_backend(layer.backend, x.device.type, config.activation) == "native"
    )


def is_plain(part: nn.Module, kind: type) -> bool:
    """Return True if ``part`` computes what its parameters say: it has exactly this type and no hooks."""
    return type(part) is kind and not part._forward_hooks and not part._forward_pre_hooks


def native_step(
    layer: "Mixer", x: Tensor, state: MixerState, starts: Tensor | None, reach: Tensor | None
) -> Tensor:
    """Return ``layer(x, state=state)`` and write the new positions into the caches; the caller commits them.

    ``starts`` and ``reach`` are int64 ``[B, T]``, or None: the first position that each new position sees,
    and how many positions it sees.
    """
    config, gates = layer.config, layer.gates
    keys, values = state.caches(x)
    history, past_inputs = state.input_cache(x) if config.conv else (None, 0)
    mix1, mix2 = (
        (None, None, None) if mix is None else (mix.diag, mix.left, mix.right)
        for mix in (layer.mix1, layer.mix2)
    )
    out: Tensor = call(
        _native_step,
        *(x, history, past_inputs, layer.k_conv, layer.v_conv),
        *(layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.o_proj.weight),
        *((None, None) if gates is None else (gates.weight, gates.bias)),
        *_gate_offsets(layer),
        *(keys, values, state.length, *mix1, *mix2),
        *(starts, reach, config.activation, config.layout, config.eps),
    )
    # Count the writes, so that a backward that saved these tensors raises an error instead of being wrong.
    written = [cache for cache in (history, keys, values) if cache is not None and not cache.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out


def _gate_offsets(layer: "Mixer") -> list[int]:
    """Return the first row of each gate (queries, output, mix1, mix2) in ``layer.gates``; -1 if absent."""
    ends = accumulate(layer.gate_sizes)
    return [end - size if size else -1 for size, end in zip(layer.gate_sizes, ends, strict=True)]
