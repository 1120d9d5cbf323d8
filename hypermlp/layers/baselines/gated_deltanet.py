"""Gated DeltaNet: DeltaNet with a decay for each head."""

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import (
    at_least_float32,
    initial_step_bias,
    initial_uniform,
    short_conv,
    split_heads,
)
from hypermlp.layers.baselines.recurrence import delta_rule
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class GatedDeltaNetConfig(MultiHeadConfig):
    """Settings of ``gated-deltanet``."""

    name = "gated-deltanet"
    heads = Heads(width=256, share=Fraction(3, 4))  # keys have three quarters of the hidden size

    expand_v: int = 2
    """Width of the values, over that of the keys."""
    conv_kernel: int = 4
    """Taps of the convolution on queries, keys and values."""

    @property
    def key_width(self) -> int:
        return 3 * self.hidden_size // 4


class GatedDeltaNet(Baseline[GatedDeltaNetConfig]):
    """The delta rule with a decay.

    For each head with keys of width C, with q, k and v from a short convolution and SiLU, q and k of norm 1::

        S[t] = a[t] (I - b[t] k[t]' k[t]) S[t-1] + b[t] k[t]' v[t]         b[t] = sigmoid(x[t] W_b)
        o[t] = q[t] S[t] / sqrt(C)             a[t] = exp(-rate * softplus(x[t] W_a + step_bias))
        y[t] = (RMSNorm(o[t]) * silu(x[t] W_g)) W_o

    Keys and queries have three quarters of the hidden size over all heads.

    Paper: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).

    Settings: ``num_heads`` (default: keys of width 256), ``expand_v`` (2), ``conv_kernel`` (4).
    """

    def build(self, config: GatedDeltaNetConfig) -> None:
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

    def initial_values(self) -> dict[str, Tensor]:
        heads = self.config.num_heads
        rates = torch.empty(heads).uniform_(1e-3, 16)
        return {
            "conv": initial_uniform(self.conv.shape, self.config.conv_kernel),
            "log_rate": rates.log(),
            "step_bias": initial_step_bias(heads),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        qkv, gate, beta, step = self.in_proj(x).split(self.sizes, dim=-1)
        qkv = F.silu(short_conv(qkv, self.conv, state, visibility.reach))
        q, k, v = split_heads(self.config.num_heads, *qkv.split(self.qkv_sizes, dim=-1))
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        step = F.softplus(at_least_float32(step) + self.step_bias)
        decay = -at_least_float32(self.log_rate).exp() * step
        inputs = q, k, v, torch.sigmoid(beta)[..., None], decay[..., None]
        out = run_recurrence(delta_rule, *inputs, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 6 * self.qkv_sizes[2] * (self.config.key_width // self.config.num_heads)
