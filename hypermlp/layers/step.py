"""One step of decoding in one kernel: all that stands between a layer's projections.

What ``Mixer._attend`` does in a dozen small operations costs more than the arithmetic when there is one new position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypermlp.config import MixerConfig
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.state import MixerState
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.backends import choose_backend
from hypermlp.ops.library import call, define, in_transform

MOST_POSITIONS = 4  # the kernel takes them one by one

_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in ("diag", "left", "right"))
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? gates, Tensor(a!) keys, Tensor(b!) values, SymInt past, "
    f"{_MIXES}, Tensor? starts, str activation, str layout, float eps) -> Tensor"
)


_CONV_SCHEMA = "(Tensor x, Tensor(a!) history, SymInt past, Tensor weight1, Tensor weight2, Tensor? reach) -> (Tensor, Tensor)"


def _fake(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty(v.shape)


def _fake_conv(x: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_native_step = define("native_step", _SCHEMA, _fake)
_native_conv_step = define("native_conv_step", _CONV_SCHEMA, _fake_conv)


def steps_natively(config: MixerConfig, x: Tensor, mixes: tuple[SequenceMix | None, ...], backend: str) -> bool:
    """Can the kernels take these new positions? They compute no derivatives, rotate nothing and know no half precision."""
    if x.shape[1] > MOST_POSITIONS or torch.is_grad_enabled() or torch.compiler.is_compiling() or config.rope:
        return False
    if x.dtype not in (torch.float32, torch.float64) or config.activation == "softmax" or autocast_enabled(x.device.type):
        return False
    if in_transform() or not all(map(_is_plain, mixes)):
        return False
    return choose_backend(backend, x.device.type, config.activation) == "native"


def _is_plain(mix: SequenceMix | None) -> bool:
    """The kernel reads the parameters and does not call the module, so nothing may be attached to it."""
    return mix is None or (type(mix) is SequenceMix and not mix._forward_hooks and not mix._forward_pre_hooks)


def _written(*caches: Tensor) -> None:
    """Let autograd know, so that a backward that saved a cache refuses instead of being wrong."""
    tracked = [cache for cache in caches if not cache.is_inference()]
    torch.autograd.graph.increment_version(tracked)


def native_conv_step(state: MixerState, x: Tensor, weight1: Tensor, weight2: Tensor, reach: Tensor | None) -> tuple[Tensor, Tensor]:
    """``causal_conv_pair`` of the state's inputs and of x, which they take in."""
    history, past = state.input_cache(x)
    outs: tuple[Tensor, Tensor] = call(_native_conv_step, x, history, past, weight1, weight2, reach)
    _written(history)
    return outs


def native_step(
    state: MixerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    mix1: SequenceMix | None,
    mix2: SequenceMix | None,
    starts: Tensor | None,
) -> Tensor:
    """Projections in, head outputs ``[B, T, H * Dv]`` out; ``gates`` before their sigmoid. The state's caches take k and v."""
    config = state.config
    keys, values = state.caches(k, v)
    parameters = [(None, None, None) if mix is None else (mix.diag, mix.left, mix.right) for mix in (mix1, mix2)]
    out: Tensor = call(
        _native_step,
        *(q, k, v, gates, keys, values, state.length),
        *(*parameters[0], *parameters[1]),
        *(starts, config.activation, config.layout, config.eps),
    )
    _written(keys, values)
    return out
