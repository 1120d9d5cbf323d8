"""DeltaNet: a memory that replaces what a key had, instead of adding to it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.parts import initial_conv, short_conv
from hypermlp.layers.baselines.recurrence import delta_rule
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(BaselineConfig):
    name = "deltanet"

    num_heads: int = 0
    """0 stands for heads of width 128."""
    conv_kernel: int = 4
    """Taps of the convolution on queries, keys and values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=128)


class DeltaNet(Baseline):
    config: DeltaNetConfig
    Config: ClassVar = DeltaNetConfig

    def __init__(self, config: DeltaNetConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden + config.num_heads, bias=False)  # q, k, v, beta
        self.conv = nn.Parameter(torch.empty(3 * hidden, config.conv_kernel))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden // config.num_heads, eps=1e-5)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"conv": initial_conv(*self.conv.shape)}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        qkv, beta = self.in_proj(x).split([self.conv.shape[0], self.config.num_heads], dim=-1)
        qkv = F.silu(short_conv(qkv, self.conv, state, "conv", visibility.reach))
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in qkv.chunk(3, dim=-1))
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        beta = torch.sigmoid(beta)[..., None]
        out, memory = delta_rule(
            q, k, v, beta, torch.zeros_like(beta), remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 6 * self.config.hidden_size * (self.config.hidden_size // self.config.num_heads)
