"""A whole layer as one operator with a backward of its own, on the CPU.

The general path is a chain of two dozen operators, of which autograd keeps every input. This operator keeps
x, q, k, v, the gates, the head outputs and what the attention operator keeps of its rows. It consists of
three kernels in each direction: around the attention operator, one computes all projections and gates
(``native_project``) and one the output projection (``native_read_out``). They finish a block of positions at
a time in the cache. The backward recomputes the convolutions where it needs them, so that no gradient of an
intermediate result is stored.

Shapes: B batch, T positions, N = B * T, D hidden size, G score branches, H heads, Dk, Dv widths, W gates.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.layers.gates import Gates
from hypermlp.layers.mixing import SequenceMix
from hypermlp.layers.step import is_plain
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.dispatch import backend_for, can_run, choose_backend
from hypermlp.ops.library import call, define, differentiate, in_transform
from hypermlp.ops.native import kept_rows

if TYPE_CHECKING:
    from hypermlp.layers.mixer import Mixer

DTYPES = (torch.float32, torch.float64)
_TENSORS = (
    "Tensor x, Tensor? k_conv, Tensor? v_conv, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
    "Tensor o_weight, Tensor gate_weight, Tensor gate_bias, "
    + ", ".join(f"Tensor? {field}{index}" for index in (1, 2) for field in ("diag", "left", "right"))
)
_OPTIONS = (
    "Tensor? starts, Tensor? reach, int heads, int q_gate, int output_gate, int mix1_gate, int mix2_gate, "
    "str activation, str layout, float eps"
)


class LayerArguments(NamedTuple):
    """The arguments of the operator, in the order of its schema."""

    x: Tensor  # [B, T, D]
    k_conv: Tensor | None  # [D, K]
    v_conv: Tensor | None
    q_weight: Tensor  # [G * Dk, D]
    k_weight: Tensor
    v_weight: Tensor  # [H * Dv, D]
    o_weight: Tensor  # [D, H * Dv]
    gate_weight: Tensor  # [W, D]
    gate_bias: Tensor
    diag1: Tensor | None
    left1: Tensor | None
    right1: Tensor | None
    diag2: Tensor | None
    left2: Tensor | None
    right2: Tensor | None
    starts: Tensor | None  # int64 [B, T]
    reach: Tensor | None  # int64 [B, T]
    heads: int
    q_gate: int  # the first column of each gate, -1 if it is absent
    output_gate: int
    mix1_gate: int
    mix2_gate: int
    activation: str
    layout: str
    eps: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that have a gradient, None for absent ones."""
        return self[:15]

    @property
    def branches(self) -> int:
        return 2 * self.heads if self.activation == "glu" else self.heads

    def by_heads(self, rows: Tensor, heads: int) -> Tensor:
        """Return ``[N, heads * width]`` as ``[B, T, heads, width]``."""
        return rows.view(*self.x.shape[:2], heads, -1)

    def projections(self) -> tuple[Any, ...]:
        """Return the arguments of the kernels of the projections, with the gate of q."""
        weights = (self.q_weight, self.k_weight, self.v_weight, self.gate_weight, self.gate_bias)
        return (self.x, self.k_conv, self.v_conv, *weights, self.reach, self.q_gate)

    def operator(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Any, ...]:
        """Return the arguments of the attention operator; all four tensors have N rows."""
        return (
            self.by_heads(q, self.branches),
            self.by_heads(k, self.branches),
            self.by_heads(v, self.heads),
            *self._mix(1, self.mix1_gate, self.branches, gates),
            *self._mix(2, self.mix2_gate, self.heads, gates),
            *(self.starts, self.activation, self.layout, self.eps),
        )

    def _mix(self, index: int, column: int, heads: int, gates: Tensor) -> tuple[Tensor | None, ...]:
        diag, left, right = self[9:12] if index == 1 else self[12:15]
        if left is None:
            return None, None, None, None
        gate = gates.narrow(1, column, heads * left.shape[2])
        return diag, left, right, gate.view(*self.x.shape[:2], heads, left.shape[2])


def forward(a: LayerArguments, *, keep: bool = True) -> tuple[Tensor, ...]:
    """Return the output ``[B, T, D]``, then q, k, v, the gates and o with N rows, and what attention keeps.

    Without ``keep`` only the output is returned, and memory is freed as early as possible.
    """
    q, k, v, gates = _project(*a.projections())
    out, rows = torch.ops.hypermlp.native(*a.operator(q, k, v, gates))
    o = out.flatten(0, 1).flatten(1)
    kept = (q, k, v, gates, o, rows) if keep else ()
    del q, k, v
    return _read_out(o, gates, a.o_weight, a.output_gate).view(a.x.shape), *kept


def backward(grad: Tensor, kept: tuple[Tensor, ...], a: LayerArguments) -> list[Tensor]:
    """Return the gradients of the tensors that are present, from that of the output and what was kept."""
    q, k, v, gates, o, rows = kept
    grad_o, grad_o_weight = _read_out_grad(grad.flatten(0, 1), o, gates, a.o_weight, a.output_gate)
    grads = torch.ops.hypermlp.native_grad(a.by_heads(grad_o, a.heads), rows, *a.operator(q, k, v, gates))
    grad_q, grad_k, grad_v = (x.flatten(0, 1).flatten(1) for x in grads[:3])
    mixes = (grads[3:7] if a.left1 is not None else [], grads[-4:] if a.left2 is not None else [])
    del grads
    of_gates = [mix[3].flatten(0, 1).flatten(1) if mix else None for mix in mixes]
    grad_x, *rest = _project_grad(
        *(grad_q, grad_k, grad_v, grad_o, *of_gates, q, o, gates),
        *(*a.projections(), a.output_gate, a.mix1_gate, a.mix2_gate),
    )
    *convs, q_weight, k_weight, v_weight, gate_weight, gate_bias = rest
    weights = (q_weight, k_weight, v_weight, grad_o_weight, gate_weight, gate_bias)
    return [grad_x, *convs, *weights, *mixes[0][:3], *mixes[1][:3]]


def _kernel(*flat: Any) -> tuple[Tensor, ...]:
    return forward(LayerArguments(*flat))


def _grad_kernel(grad: Tensor, *rest: Any) -> list[Tensor]:
    return backward(grad, rest[:6], LayerArguments(*rest[6:]))


def _fake(*flat: Any) -> tuple[Tensor, ...]:
    a = LayerArguments(*flat)
    x, count = a.x, a.x.shape[0] * a.x.shape[1]
    widths = [weight.shape[0] for weight in (a.q_weight, a.k_weight, a.v_weight, a.gate_weight, a.v_weight)]
    kept = [x.new_empty(count, width) for width in widths]
    attention = Attention.unflatten(a.operator(*kept[:4]))
    return x.new_empty(x.shape), *kept, kept_rows(attention)


def _fake_grad(grad: Tensor, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in LayerArguments(*rest[6:]).tensors() if x is not None]


def _fake_project(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights = rest[2:6]
    return tuple(x.new_empty(x.shape[0] * x.shape[1], weight.shape[0]) for weight in weights)


def _fake_read_out(o: Tensor, gates: Tensor, weight: Tensor, output_gate: int) -> Tensor:
    return o.new_empty(o.shape[0], weight.shape[0])


def _fake_read_out_grad(grad: Tensor, o: Tensor, gates: Tensor, weight: Tensor, gate: int) -> Any:
    return torch.empty_like(o), torch.empty_like(weight)


def _fake_project_grad(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[9:17] if x is not None]


_PROJECTIONS = (
    "Tensor x, Tensor? k_conv, Tensor? v_conv, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
    "Tensor gate_weight, Tensor gate_bias, Tensor? reach, int q_gate"
)
_READ_OUT = "Tensor o, Tensor gates, Tensor weight, int output_gate"
_GRADS = (
    "Tensor(a!) grad_q, Tensor grad_k, Tensor grad_v, Tensor(b!) grad_o, Tensor(c!)? grad_gate1, "
    "Tensor(d!)? grad_gate2, Tensor q, Tensor o, Tensor gates"
)
_project = define("native_project", f"({_PROJECTIONS}) -> (Tensor, Tensor, Tensor, Tensor)", _fake_project)
_project_grad = define(
    "native_project_grad",
    f"({_GRADS}, {_PROJECTIONS}, int output_gate, int mix1_gate, int mix2_gate) -> Tensor[]",
    _fake_project_grad,
)
_read_out = define("native_read_out", f"({_READ_OUT}) -> Tensor", _fake_read_out)
_read_out_grad = define(
    "native_read_out_grad", f"(Tensor grad, {_READ_OUT}) -> (Tensor, Tensor)", _fake_read_out_grad
)

_KEPT = ", ".join(f"Tensor {name}" for name in ("q", "k", "v", "gates", "o", "rows"))
_layer = define("native_layer", f"({_TENSORS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * 7)})", _fake)
_layer_grad = define(
    "native_layer_grad", f"(Tensor grad, {_KEPT}, {_TENSORS}, {_OPTIONS}) -> Tensor[]", _fake_grad
)
torch.library.impl("hypermlp::native_layer", "default", _kernel)
torch.library.impl("hypermlp::native_layer_grad", "default", _grad_kernel)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = LayerArguments(*inputs)
    ctx.options = inputs[17:]
    ctx.save_for_backward(*output[1:], *a.tensors(), a.starts, a.reach)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_grads: Any) -> tuple[Tensor | None, ...]:
    count = len(LayerArguments._fields)
    if grad is None:
        return (None,) * count
    saved = ctx.saved_tensors
    grads = iter(_layer_grad(grad, *saved, *ctx.options))
    present = [None if x is None else next(grads) for x in saved[6:21]]
    return *present, *(None,) * (count - len(present))


differentiate("native_layer", "native_layer_grad", "the layer", _backward, _save)


def fuses(layer: "Mixer", x: Tensor) -> bool:
    """Return True if the operator can take the whole layer.

    It reads parameters instead of calling modules, so these must be plain: adapters and hooks take the
    general path, as do RoPE, Canon layers, registers, autocast, half precision and compiled code.
    """
    config = layer.config
    if config.rope or config.canon or config.num_registers or layer.gates is None or x.dtype not in DTYPES:
        return False
    if x.device.type != "cpu" or torch.compiler.is_compiling() or in_transform() or autocast_enabled("cpu"):
        return False
    parts: list[tuple[nn.Module | None, type]] = [
        *((part, nn.Linear) for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)),
        *((part, SequenceMix) for part in (layer.mix1, layer.mix2)),
        (layer.gates, Gates),
    ]
    if not all(part is None or is_plain(part, kind) for part, kind in parts):
        return False
    learns = torch.is_grad_enabled()
    for parameter in layer.parameters():
        if type(parameter) is not nn.Parameter or parameter.dtype != x.dtype:
            return False
        if learns and not parameter.requires_grad:
            return False
    mixed = config.mix1 or config.mix2
    request = Request("attention", "cpu", x.dtype, config.activation, mixed, learns)
    if not can_run(layer.backend, request) or choose_backend(layer.backend, request).name != "native":
        return False
    conv = Request("convolution", "cpu", x.dtype, needs_grad=learns)
    return not config.conv or choose_backend(backend_for(layer.backend, "convolution"), conv).name == "native"


def fused_layer(layer: "Mixer", x: Tensor, visibility: Visibility) -> Tensor:
    """Compute ``layer.mix`` without a state."""
    config, gates = layer.config, layer.gates
    assert gates is not None
    mixes = [
        (None, None, None) if mix is None else (mix.diag, mix.left, mix.right)
        for mix in (layer.mix1, layer.mix2)
    ]
    flat: tuple[Any, ...] = (
        *(x, layer.k_conv, layer.v_conv),
        *(layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.o_proj.weight),
        *(gates.weight, gates.bias, *mixes[0], *mixes[1]),
        *(visibility.rows, visibility.reach, config.num_heads, *gates.offsets),
        *(config.activation, config.layout, config.eps),
    )
    if not torch.is_grad_enabled():
        with torch._C._AutoDispatchBelowAutograd():
            return forward(LayerArguments(*flat), keep=False)[0]
    out: Tensor = call(_layer, *flat)[0]
    return out
