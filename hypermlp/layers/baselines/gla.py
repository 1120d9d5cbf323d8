"""Gated linear attention: each row of the memory forgets at its own, input-dependent rate."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, largest_divisor, remembered
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

GATE_TEMPERATURE = 16.0  # log decays are divided by it: a fresh layer forgets slowly


@dataclass(frozen=True, kw_only=True)
class GlaConfig(BaselineConfig):
    name = "gla"

    num_heads: int = 0
    """0 stands for 4, or as many as fit. Keys have half the hidden size in all, values all of it."""
    gate_rank: int = 16
    """Of the two matrices that make the decays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("num_heads", largest_divisor(self.hidden_size // 2, 4))
        self.choose_heads(multiple=2)


class GatedLinearAttention(Baseline):
    config: GlaConfig
    Config: ClassVar = GlaConfig

    def __init__(self, config: GlaConfig):
        super().__init__(config)
        hidden, keys = config.hidden_size, config.hidden_size // 2
        self.sizes = [keys, keys, hidden, hidden, config.gate_rank]  # q, k, v, output gate, decays
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.decay_proj = nn.Linear(config.gate_rank, keys)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden // config.num_heads, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, gate, low = self.in_proj(x).split(self.sizes, dim=-1)
        decay = F.logsigmoid(self.decay_proj(low)) / GATE_TEMPERATURE
        q, k, v, decay = (y.unflatten(-1, (self.config.num_heads, -1)) for y in (*qkv, decay))
        out, memory = gated_attention(
            q * q.shape[-1] ** -0.5, k, v, decay, remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * (self.config.hidden_size // 2 // self.config.num_heads)
