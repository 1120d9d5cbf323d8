"""RetNet: retention, a decay for each head, rotary positions, a gate on the output."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.rotary import rotate
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class RetNetConfig(BaselineConfig):
    name = "retnet"

    num_heads: int = 0
    """0 stands for keys of width 256, but at least two heads."""
    expand_v: int = 2
    """Width of the values over the hidden size."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=256, least=2, multiple=2)


def log_decays(num_heads: int, like: Tensor) -> Tensor:
    """``log(1 - 2 ** (-5 - h))`` for head h."""
    heads = torch.arange(num_heads, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.log1p(-(2.0 ** (-5 - heads)))


class RetNet(Baseline):
    config: RetNetConfig
    Config: ClassVar = RetNetConfig

    def __init__(self, config: RetNetConfig):
        super().__init__(config)
        hidden, values = config.hidden_size, config.expand_v * config.hidden_size
        self.sizes = [hidden, hidden, values, values]  # q, k, v, gate
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.norm = nn.RMSNorm(values // config.num_heads, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions = visibility.stream()[None]
        *qkv, gate = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in qkv)
        q, k = (rotate(y, positions, self.config.rope_theta) for y in (q, k))
        decay = log_decays(self.config.num_heads, x)[:, None].expand(*q.shape[:3], 1)
        out, memory = gated_attention(
            q * q.shape[-1] ** -0.5, k, v, decay, remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.sizes[2] * (self.config.hidden_size // self.config.num_heads)
