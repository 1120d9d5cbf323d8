"""Gated slot attention: a softmax over a fixed number of slots, each of which forgets at its own rate.

Shapes: B batch, T positions, H heads, K and V widths of keys and values, S slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig
from hypermlp.layers.baselines.parts import Memory, Reach, at_least_float32, remembered, split_heads
from hypermlp.layers.baselines.recurrence import gated_attention, gated_slots
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

GATE_TEMPERATURE = 8.0  # log decays are divided by it, so that a fresh layer forgets slowly


class GsaConfig(MultiHeadConfig):
    """Settings of ``gsa``."""

    name = "gsa"
    heads = Heads(count=4)

    num_slots: int = 0
    """Slots of each head; 0 for a head's width, at most 64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("num_slots", min(64, self.head_width))


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    memories: tuple[Memory, Memory] = (None, None),
    reach: Reach = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Write keys and values into slots; read the values by a softmax over the scores of the slots' keys.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        write, log_decay: ``[B, T, H, S]``.
        memories: the keys, ``[B, H, K, S]``, and the values, ``[B, H, S, V]``, that the slots hold.

    Returns:
        All o, ``[B, T, H, V]``, and the memories after the last position.
    """
    if kernels.usable(q, reach):
        return kernels.slot_attention(q, k, v, write, log_decay, memories)
    scores, keys = gated_slots(q, k, write, log_decay, memories[0], reach)
    out, values = gated_attention(scores.softmax(-1), write, v, log_decay, memories[1], reach)
    return out, (keys, values)


class GatedSlotAttention(Baseline[GsaConfig]):
    """Gated slot attention (GSA).

    For each head, with silu on q, k and v::

        K[t] = Diag(a[t]) K[t-1] + (1 - a[t])' k[t]       a[t] = sigmoid(x[t] W_a) ** (1 / 8), for each slot
        V[t] = Diag(a[t]) V[t-1] + (1 - a[t])' v[t]
        o[t] = softmax(q[t] K[t]') V[t]
        y[t] = RMSNorm(silu(o[t])) W_o                    over all heads together

    Paper: Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (2024).

    Settings: ``num_heads`` (4, or fewer if 4 does not divide hidden_size), ``num_slots`` (default: a head's
    width, at most 64).
    """

    def build(self, config: GsaConfig) -> None:
        hidden = config.hidden_size
        self.sizes = [hidden, hidden, hidden, config.num_heads * config.num_slots]  # q, k, v, forget gates
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, forget = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v, forget = split_heads(self.config.num_heads, *map(F.silu, qkv), at_least_float32(forget))
        decay = F.logsigmoid(forget) / GATE_TEMPERATURE
        write = -torch.expm1(decay)
        past = remembered(state, "keys"), remembered(state, "values")
        out, memories = slot_attention(q, k, v, write, decay, past, visibility.reach)
        if state is not None:
            state["keys"], state["values"] = memories
        return self.o_proj(self.norm(F.silu(out.to(x.dtype)).flatten(2)))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 8 * self.config.hidden_size * self.config.num_slots
