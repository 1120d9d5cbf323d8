"""Linear attention: softmax's exponential replaced by a product of positive features."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class LinearConfig(BaselineConfig):
    name = "linear"

    num_heads: int = 0
    """0 stands for heads of width 64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=64)


class LinearAttention(Baseline):
    """Features ``elu(x) + 1``.

    The sum is normalised by an RMSNorm of each head, not by the sum of weights.
    """

    config: LinearConfig
    Config: ClassVar = LinearConfig

    def __init__(self, config: LinearConfig):
        super().__init__(config)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = nn.RMSNorm(config.hidden_size // config.num_heads, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in self.qkv_proj(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if visibility.reach is not None:
            k = k * (visibility.reach > 0)[:, :, None, None]  # the features of nothing are one
        no_decay = torch.zeros_like(q[..., :1])
        out, memory = gated_attention(
            q * q.shape[-1] ** -0.5, k, v, no_decay, remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * (self.config.hidden_size // self.config.num_heads)
