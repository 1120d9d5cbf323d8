"""Gated slot attention:

a fixed number of slots, each forgetting at its own rate, read by a softmax over them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.base import Baseline, BaselineConfig, largest_divisor, remembered
from hypermlp.layers.baselines.recurrence import gated_attention, gated_slots
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

GATE_TEMPERATURE = 8.0  # log decays are divided by it


@dataclass(frozen=True, kw_only=True)
class GsaConfig(BaselineConfig):
    name = "gsa"

    num_heads: int = 0
    """0 stands for 4, or as many as fit. Keys and values have the hidden size in all."""
    num_slots: int = 0
    """Of each head; 0 stands for a head's width, at most 64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("num_heads", largest_divisor(self.hidden_size, 4))
        self.choose_heads()
        self.fill("num_slots", min(64, self.hidden_size // self.num_heads))


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    memories: tuple[Tensor | None, Tensor | None] = (None, None),
    reach: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Keys are written into slots, a softmax over the slots' scores reads values out of the same slots.

    ``q``, ``k``: ``[B, T, H, K]``; ``v``: ``[B, T, H, V]``; ``write``, ``log_decay``: ``[B, T, H, slots]``.
    """
    if kernels.usable(q, reach):
        return kernels.slot_attention(q, k, v, write, log_decay, memories)
    scores, keys = gated_slots(q, k, write, log_decay, memories[0], reach)
    out, values = gated_attention(scores.softmax(-1), write, v, log_decay, memories[1], reach)
    return out, (keys, values)


class GatedSlotAttention(Baseline):
    config: GsaConfig
    Config: ClassVar = GsaConfig

    def __init__(self, config: GsaConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.sizes = [hidden, hidden, hidden, config.num_heads * config.num_slots]  # q, k, v, forget gates
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, forget = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v, forget = (y.unflatten(-1, (self.config.num_heads, -1)) for y in (*map(F.silu, qkv), forget))
        decay = F.logsigmoid(forget.to(torch.promote_types(x.dtype, torch.float32))) / GATE_TEMPERATURE
        write = -torch.expm1(decay)
        memories = remembered(state, "keys"), remembered(state, "values")
        out, (keys, values) = slot_attention(q, k, v, write, decay, memories, visibility.reach)
        if state is not None:
            state["keys"], state["values"] = keys, values
        return self.o_proj(self.norm(F.silu(out.to(x.dtype)).flatten(2)))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 8 * self.config.hidden_size * self.config.num_slots
