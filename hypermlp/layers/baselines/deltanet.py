"""DeltaNet: a memory that replaces what it holds for a key, instead of adding to it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import initial_uniform, short_conv, split_heads
from hypermlp.layers.baselines.recurrence import delta_rule
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class DeltaNetConfig(MultiHeadConfig):
    """Settings of ``deltanet``."""

    name = "deltanet"
    heads = Heads(width=128)

    conv_kernel: int = 4
    """Taps of the convolution on queries, keys and values."""


class DeltaNet(Baseline[DeltaNetConfig]):
    """The delta rule.

    For each head of width C, with q, k and v from a short convolution and SiLU, q and k of norm 1::

        S[t] = (I - b[t] k[t]' k[t]) S[t-1] + b[t] k[t]' v[t]         b[t] = sigmoid(x[t] W_b)
        o[t] = q[t] S[t] / sqrt(C)
        y[t] = RMSNorm(o[t]) W_o

    Paper: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).

    Settings: ``num_heads`` (default: heads of width 128), ``conv_kernel`` (4).
    """

    def build(self, config: DeltaNetConfig) -> None:
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden + config.num_heads, bias=False)  # q, k, v, beta
        self.conv = nn.Parameter(torch.empty(3 * hidden, config.conv_kernel))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(config.head_width, eps=1e-5)

    def initial_values(self) -> dict[str, Tensor]:
        return {"conv": initial_uniform(self.conv.shape, self.config.conv_kernel)}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        heads = self.config.num_heads
        qkv, beta = self.in_proj(x).split([self.conv.shape[0], heads], dim=-1)
        qkv = F.silu(short_conv(qkv, self.conv, state, visibility.reach))
        q, k, v = split_heads(heads, *qkv.chunk(3, dim=-1))
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        beta = torch.sigmoid(beta)[..., None]
        inputs = q, k, v, beta, torch.zeros_like(beta)  # no decay
        out = run_recurrence(delta_rule, *inputs, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 6 * self.config.hidden_size * self.config.head_width
