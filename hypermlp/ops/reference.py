"""The definition of the operator: dense, one line per equation, differentiable by autograd.

Every other backend is tested against it. The paper's symbols: q, k, v; z scores, h pre-activation, a
activation, o output; A, B, p, s of R = I + Diag(p) + A Diag(s) Bᵀ.

Shapes: B batch, H heads, i query, j key, n slot, r rank, d width. Scores are [B, H, Tq, slots] in slot order.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.layout import SlotMaps, slot_maps, visible_keys


def attention(arguments: Attention, maps: SlotMaps | None = None) -> Tensor:
    """Compute the equations; half precision is computed in float32. ``trace`` explains ``maps``."""
    input_dtype = arguments.q.dtype
    dtype = torch.promote_types(input_dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (arguments.q, arguments.k, arguments.v))
    mix1, mix2 = (mix and Mix(*(x.to(dtype) for x in mix)) for mix in (arguments.mix1, arguments.mix2))
    arguments = arguments._replace(q=q, k=k, v=v, mix1=mix1, mix2=mix2)
    return trace(arguments, maps).output.to(input_dtype)


class Trace(NamedTuple):
    """Every intermediate result, in slot order ``[B, H, Tq, slots]`` unless stated otherwise.

    "glu" has 2 H scores and pre-activations.
    """

    scores: Tensor
    pre_activation: Tensor
    activation: Tensor
    weights: Tensor
    """The weights of the readout."""
    weights_of_keys: Tensor
    """The same weights by key, ``[B, H, Tq, keys]``."""
    exists: Tensor
    """Which slots exist, bool ``[B or 1, 1, Tq, slots]``."""
    output: Tensor
    """``[B, Tq, H, Dv]``"""


def trace(arguments: Attention, maps: SlotMaps | None = None) -> Trace:
    """Compute the equations in the dtype of the tensors and return every intermediate result.

    ``maps``: where the keys of each slot are; None if the queries are the last positions of the keys. With
        maps, the mixes must have as many slots as there are keys.
    """
    q, k, v, mix1, mix2, starts, activation, layout, eps = arguments
    Tq, Tk = q.shape[1], k.shape[1]
    if maps is None:
        visible = visible_keys(starts, Tq, Tk, q.device)
        maps = SlotMaps(visible, *slot_maps(layout, starts, Tq, Tk, q.device))
        mix1, mix2 = (mix and with_slots(mix, Tk) for mix in (mix1, mix2))
    visible, key_of_slot, slot_of_key = (m[:, None] for m in maps)  # [B, 1, Tq, keys or slots]
    exists = torch.arange(Tk, device=q.device) < visible.sum(-1, keepdim=True)  # [B, 1, Tq, slots]

    z = _reorder(torch.einsum("bihd,bjhd->bhij", q, k), key_of_slot, exists)
    h = z if mix1 is None else _masked(_times_R(z, *mix1), exists)
    if activation == "softmax":
        a = _masked(_masked(h * q.shape[-1] ** -0.5, exists, torch.finfo(h.dtype).min).softmax(-1), exists)
    elif activation == "relu":
        a = F.relu(_l2norm(h, eps))
    else:
        h_gate, h_scale = h.chunk(2, dim=1)
        a = _softplus(h_scale) * F.relu(_l2norm(h_gate, eps))
    w = a if mix2 is None else _times_R_transposed(a, *mix2)
    by_key = _reorder(w, slot_of_key, visible)
    return Trace(z, h, a, w, by_key, exists, torch.einsum("bhij,bjhd->bihd", by_key, v))


def _times_R(y: Tensor, p: Tensor, A: Tensor, B: Tensor, s: Tensor) -> Tensor:
    """y R = y + y ⊙ p + ((y A) ⊙ s) Bᵀ"""
    u = torch.einsum("bhin,hnr->bhir", y, A) * s.transpose(1, 2)
    return y + y * p[:, None, :] + torch.einsum("bhir,hnr->bhin", u, B)


def _times_R_transposed(y: Tensor, p: Tensor, A: Tensor, B: Tensor, s: Tensor) -> Tensor:
    """y Rᵀ = y + y ⊙ p + ((y B) ⊙ s) Aᵀ"""
    return _times_R(y, p, B, A, s)


def _l2norm(h: Tensor, eps: float) -> Tensor:
    """h / rho with rho = sqrt(‖h‖² + eps), over the slots that exist (the others are zero)"""
    return h / (h.square().sum(-1, keepdim=True) + eps).sqrt()


def _softplus(x: Tensor) -> Tensor:
    """log(eˣ + 1), accurate at both ends"""
    return torch.logaddexp(x, torch.zeros_like(x))


def with_slots(mix: Mix, slots: int) -> Mix:
    """Return the mix with its first ``slots`` slots, zeros beyond the last one: such slots are never
    visible.
    """
    diag, left, right = (_rows(x, slots) for x in mix[:3])
    return Mix(diag, left, right, mix.gate)


def _rows(parameter: Tensor, slots: int) -> Tensor:
    """Return the first ``slots`` rows, zeros beyond the last one.

    Selected by index, because a slice would make torch.export exclude the length at which it is the whole.
    """
    index = torch.arange(slots, device=parameter.device)
    last = parameter.shape[1] - 1
    rows = parameter.index_select(1, index.clamp(max=last))
    return rows.movedim(1, -1).masked_fill(index > last, 0).movedim(-1, 1)


def _reorder(x: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    return _masked(x.gather(-1, index.expand(x.shape)), keep)


def _masked(x: Tensor, keep: Tensor, value: float = 0.0) -> Tensor:
    return x.masked_fill(~keep, value)
