"""Gated linear attention: each row of the memory forgets at its own rate, which the input sets."""

from fractions import Fraction

import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import split_heads
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

GATE_TEMPERATURE = 16.0  # log decays are divided by it, so that a fresh layer forgets slowly


class GlaConfig(MultiHeadConfig):
    """Settings of ``gla``."""

    name = "gla"
    heads = Heads(count=4, share=Fraction(1, 2))  # keys have half the hidden size

    gate_rank: int = 16
    """Rank of the matrix that makes the decays."""


class GatedLinearAttention(Baseline[GlaConfig]):
    """Gated linear attention (GLA).

    For each head with keys of width C::

        S[t] = Diag(a[t]) S[t-1] + k[t]' v[t]         a[t] = sigmoid(x[t] W_1 W_2 + b) ** (1 / 16)
        o[t] = q[t] S[t] / sqrt(C)
        y[t] = (RMSNorm(o[t]) * silu(x[t] W_g)) W_o

    Keys and queries have half the hidden size over all heads, values all of it.

    Paper: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024).

    Settings: ``num_heads`` (4, or fewer if 4 does not divide hidden_size / 2), ``gate_rank`` (16).
    """

    def build(self, config: GlaConfig) -> None:
        hidden, keys = config.hidden_size, config.hidden_size // 2
        self.sizes = [keys, keys, hidden, hidden, config.gate_rank]  # q, k, v, output gate, decays
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.decay_proj = nn.Linear(config.gate_rank, keys)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(config.head_width, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, gate, low_rank = self.in_proj(x).split(self.sizes, dim=-1)
        decay = F.logsigmoid(self.decay_proj(low_rank)) / GATE_TEMPERATURE
        q, k, v, decay = split_heads(self.config.num_heads, *qkv, decay)
        q = q * q.shape[-1] ** -0.5
        out = run_recurrence(gated_attention, q, k, v, decay, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * (self.config.head_width // 2)
