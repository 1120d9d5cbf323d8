"""When a layer runs as one operator, and its arguments.

The operators of ``hypermlp.ops.layer`` read a layer's parameters instead of calling its modules. They are
used only if each module computes exactly what its parameters say; everything else takes the general path of
``Mixer``, with the same result.

Shapes: B batch, T new positions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig
from hypermlp.layers.gates import Gates
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.plain import PARAMETERS, has_global_hooks, is_ordinary, plain_alone
from hypermlp.layers.rotary import Rope, angles
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import find_backend
from hypermlp.ops.layer import LayerArguments, LayerWeights, RingStepArguments, StepArguments
from hypermlp.ops.library import in_transform

if TYPE_CHECKING:
    from hypermlp.layers.mixer import Mixer

MAX_POSITIONS = 4  # of a sequence in a step: the kernel takes them one by one
MAX_ROWS = 32  # of the batch in a step: for more, ordinary matrix products are faster
PARTS: dict[str, type] = {  # in the order of LayerWeights
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), nn.Linear),
    "gates": Gates,
    **dict.fromkeys(("mix1", "mix2"), SequenceMix),
}
NO_GATES = (-1, -1, -1, -1)


def fast_path(layer: "Mixer", x: Tensor, state: Any, visibility: Visibility) -> Callable[[], Tensor] | None:
    """Return a function that computes ``layer.mix`` as one operator; None for the general path."""
    arguments: Callable[..., Any]
    config, learns = layer.config, torch.is_grad_enabled()
    if torch.compiler.is_compiling() or in_transform() or autocast_enabled(x.device.type) or config.canon:
        return None
    if state is None:
        operation, arguments = "layer", _layer_arguments
        possible = not (config.rope or config.num_registers)
    elif state.capacity is None:
        operation, arguments = "step", _step_arguments
        possible = not learns and x.shape[1] <= MAX_POSITIONS and x.shape[0] * x.shape[1] <= MAX_ROWS
    else:
        operation, arguments = "ring_step", _ring_step_arguments
        possible = not learns and x.shape[1] == 1 and visibility.in_ring and not config.rope
    weights = plain_weights(layer, x.dtype, learns) if possible else None
    if weights is None:
        return None
    mixed = config.mix1 or config.mix2
    request = Request(operation, x.device.type, x.dtype, config.activation, mixed)
    backend = find_backend(layer.backend, request)
    if backend is None:
        return None
    return lambda: getattr(backend, operation)(arguments(layer, x, state, visibility, weights))


def plain_weights(layer: "Mixer", dtype: torch.dtype, learns: bool) -> LayerWeights | None:
    """Return the layer's parameters; None if a module is not plain, or if kernels cannot read a parameter.

    ``learns``: whether gradients are computed. Then a parameter that needs none takes the general path, which
    does not compute its gradient.
    """
    if has_global_hooks():
        return None
    # Submodules and parameters are read from their dictionaries: attributes of nn.Module are slow.
    config, parts, own = layer.config, layer._modules, layer._parameters
    weights: list[Any] = [own.get("k_conv"), own.get("v_conv")]
    for name, kind in PARTS.items():
        part = parts.get(name)
        if part is None and (kind is nn.Linear or getattr(config, name, False)):
            return None
        if part is None:
            weights += [None] * len(PARAMETERS[kind])
        elif plain_alone(part, kind):
            weights += map(part._parameters.__getitem__, PARAMETERS[kind])
        else:
            return None
    if config.conv:
        k_conv, v_conv = weights[:2]
        if not (is_ordinary(k_conv) and is_ordinary(v_conv)) or k_conv.shape != v_conv.shape:
            return None
    if config.num_registers and not is_ordinary(own.get("registers")):
        return None
    for x in weights:
        if x is None:
            continue
        if x.dtype != dtype or x.layout is not torch.strided or (learns and not x.requires_grad):
            return None
    gates: Any = parts.get("gates")
    offsets = NO_GATES if gates is None else gates.offsets
    return LayerWeights._make([*weights, *offsets, config.activation, config.layout, config.eps])


def _layer_arguments(
    layer: "Mixer", x: Tensor, _state: Any, visibility: Visibility, weights: LayerWeights
) -> LayerArguments:
    keep = torch.is_grad_enabled()
    return LayerArguments(
        x, weights, visibility.first_visible, visibility.reach, layer.config.num_heads, keep
    )


def _step_arguments(
    layer: "Mixer", x: Tensor, state: Any, visibility: Visibility, weights: LayerWeights
) -> StepArguments:
    """Return the arguments of a step; what it writes still has to be committed."""
    config, own = layer.config, layer._parameters
    state.check_kind("keys", x)
    keys, _ = state.room("keys", x, (config.num_branches, config.qk_dim))
    values, past = state.room("values", x, (config.num_heads, config.vo_dim))
    history, past_inputs = None, 0
    if config.conv:
        history, past_inputs = state.room("inputs", x, x.shape[2:], needed=config.conv_kernel - 1)
    cos, sin = _angles(config, x.dtype, visibility) if config.rope else (None, None)
    starts = visibility.starts_from(state.length - past)
    caches = (history, past_inputs, keys, values, past)
    return StepArguments(x, weights, own.get("registers"), cos, sin, *caches, starts, visibility.reach)


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


def _ring_step_arguments(
    _layer: "Mixer", x: Tensor, state: Any, visibility: Visibility, weights: LayerWeights
) -> RingStepArguments:
    state.check_kind("keys", x)
    history, keys, values = (state.rows(name) for name in ("inputs", "keys", "values"))
    visible = (visibility.first_visible, visibility.reach)
    return RingStepArguments(x, weights, history, keys, values, state.past, *visible)
