"""A decoding step on a state of fixed size as one operator of the backend "triton".

The general path of a step is three dozen small operations, each a launch on a GPU. This one is eleven.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hypermlp.layers.gates import GateValues
from hypermlp.layers.static_state import StaticState
from hypermlp.layers.step import LINEAR, MIX_FIELDS, PARTS, is_plain
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import backend_for, choose_backend
from hypermlp.ops.library import call, define, in_transform

if TYPE_CHECKING:
    from hypermlp.layers.mixer import Mixer

_MIXES = ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in MIX_FIELDS)
_SCHEMA = (
    "(Tensor x, Tensor(a!)? inputs, Tensor? k_conv, Tensor? v_conv, Tensor[] weights, Tensor? gate_weight, "
    "Tensor? gate_bias, int[] sizes, Tensor(b!) keys, Tensor(c!) values, Tensor counter, "
    f"{_MIXES}, Tensor? starts, Tensor? reach, str activation, str layout, float eps) -> Tensor"
)


def _triton_step(x: Tensor, inputs: Tensor | None, *rest: Any) -> Tensor:
    from hypermlp.ops.triton.step import step

    k_conv, v_conv, weights, gate_weight, gate_bias, sizes, keys, values, counter = rest[:9]
    mixes, (starts, reach), settings = list(rest[9:15]), rest[15:17], rest[17:]
    given = (x, inputs, (k_conv, v_conv), weights, (gate_weight, gate_bias), sizes)
    return step(*given, keys, values, counter, mixes, starts, reach, settings)


_step_op = define("triton_step", _SCHEMA, lambda x, *_rest: x.new_empty(x.shape))
torch.library.impl("hypermlp::triton_step", "default", _triton_step)


def steps_in_triton(layer: "Mixer", x: Tensor, visibility: Visibility) -> bool:
    """Return True if the operator can take this call: one new position, no gradients, plain modules.

    A compiled function takes the general path, whose operations the compiler fuses.
    """
    config = layer.config
    if x.shape[1] != 1 or not visibility.in_ring or config.rope or config.activation == "softmax":
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_transform():
        return False
    if autocast_enabled(x.device.type):
        return False
    for name, kind in PARTS.items():
        part = layer._modules.get(name)
        weight = None if part is None else part._parameters.get("weight")
        if part is not None and (
            not is_plain(part, kind) or (weight is not None and weight.dtype != x.dtype)
        ):
            return False
    mixed = config.mix1 or config.mix2
    request = Request("ring", x.device.type, x.dtype, config.activation, mixed)
    return choose_backend(backend_for(layer.backend, "ring"), request).name == "triton"


def triton_step(layer: "Mixer", x: Tensor, state: StaticState, visibility: Visibility) -> Tensor:
    """Compute ``layer.mix``; the rings are written, the state still has to be committed."""
    parts = layer._modules
    state.check_kind("keys", x)
    mixes: list[Any] = []
    for name in ("mix1", "mix2"):
        mix = parts.get(name)
        mixes += (None, None, None) if mix is None else (mix._parameters[field] for field in MIX_FIELDS)
    gates: Any = parts.get("gates")
    shapes = {} if gates is None else gates.shapes
    sizes = [math.prod(shapes[name]) if name in shapes else 0 for name in GateValues._fields]
    weight, bias = (None, None) if gates is None else (gates.weight, gates.bias)
    config = layer.config
    out: Tensor = call(
        _step_op,
        *(x, state.rows("inputs"), layer.k_conv, layer.v_conv),
        [parts[name]._parameters["weight"] for name in LINEAR],  # type: ignore[union-attr]
        *(weight, bias, sizes, state.rows("keys"), state.rows("values"), state.past, *mixes),
        *(visibility.rows, visibility.reach, config.activation, config.layout, config.eps),
    )
    return out
