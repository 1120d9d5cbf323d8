"""Gated DeltaNet: DeltaNet that also forgets, at a rate of each head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.config import require
from hypermlp.layers.baselines.base import Baseline, BaselineConfig, largest_divisor, remembered
from hypermlp.layers.baselines.parts import initial_conv, initial_step_bias, short_conv
from hypermlp.layers.baselines.recurrence import delta_rule
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(BaselineConfig):
    name = "gated-deltanet"

    num_heads: int = 0
    """Keys have three quarters of the hidden size in all; 0 stands for heads of width 256."""
    expand_v: int = 2
    """Width of the values over that of the keys."""
    conv_kernel: int = 4
    """Taps of the convolution on queries, keys and values."""

    @property
    def key_width(self) -> int:
        return 3 * self.hidden_size // 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "hidden_size",
            self.hidden_size,
            self.hidden_size % 4 == 0,
            "a multiple of 4: keys have three quarters of it",
        )
        self.fill("num_heads", largest_divisor(self.key_width, self.key_width // 256))
        require(
            "num_heads",
            self.num_heads,
            self.key_width % self.num_heads == 0,
            f"a divisor of the keys' width {self.key_width}",
        )


class GatedDeltaNet(Baseline):
    config: GatedDeltaNetConfig
    Config: ClassVar = GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config)
        hidden, keys, heads = config.hidden_size, config.key_width, config.num_heads
        values = config.expand_v * keys
        self.qkv_sizes = [keys, keys, values]
        self.sizes = [sum(self.qkv_sizes), values, heads, heads]  # qkv, output gate, beta, decay
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.empty(sum(self.qkv_sizes), config.conv_kernel))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.norm = nn.RMSNorm(values // heads, eps=1e-5)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        heads = self.config.num_heads
        rates = torch.empty(heads).uniform_(1e-3, 16)
        return {
            "conv": initial_conv(*self.conv.shape),
            "log_rate": rates.log(),
            "step_bias": initial_step_bias(heads),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        qkv, gate, beta, step = self.in_proj(x).split(self.sizes, dim=-1)
        qkv = F.silu(short_conv(qkv, self.conv, state, "conv", visibility.reach))
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in qkv.split(self.qkv_sizes, dim=-1))
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        decay = -self.log_rate.to(dtype).exp() * F.softplus(step.to(dtype) + self.step_bias)
        out, memory = delta_rule(
            q,
            k,
            v,
            torch.sigmoid(beta)[..., None],
            decay[..., None],
            remembered(state, "memory"),
            visibility.reach,
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 6 * self.qkv_sizes[2] * (self.config.key_width // self.config.num_heads)
