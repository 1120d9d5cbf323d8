"""RetNet: linear attention that forgets at a fixed rate for each head, with rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import split_heads
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class RetNetConfig(MultiHeadConfig):
    """Settings of ``retnet``."""

    name = "retnet"
    heads = Heads(width=256, least=2, multiple=2)

    expand_v: int = 2
    """Width of the values, over the hidden size."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""


def log_decays(num_heads: int, like: Tensor) -> Tensor:
    """Return ``log(1 - 2 ** (-5 - h))`` for each head h, on the device of ``like``, in float32 at least."""
    heads = torch.arange(num_heads, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.log1p(-(2.0 ** (-5 - heads)))


class RetNet(Baseline[RetNetConfig]):
    """Retention.

    For head h with keys of width C, q and k rotated by their positions::

        S[t] = (1 - 2 ** (-5 - h)) S[t-1] + k[t]' v[t]
        o[t] = q[t] S[t] / sqrt(C)
        y[t] = (RMSNorm(o[t]) * silu(x[t] W_g)) W_o           the paper has a GroupNorm

    Paper: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models" (2023).

    Settings: ``num_heads`` (default: keys of width 256, but at least two heads), ``expand_v`` (2),
    ``rope_theta`` (10,000).
    """

    def build(self, config: RetNetConfig) -> None:
        hidden, values = config.hidden_size, config.expand_v * config.hidden_size
        self.sizes = [hidden, hidden, values, values]  # q, k, v, gate
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.norm = nn.RMSNorm(values // config.num_heads, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions, heads = visibility.stream()[None], self.config.num_heads
        *qkv, gate = self.in_proj(x).split(self.sizes, dim=-1)
        q, k, v = split_heads(heads, *qkv)
        q, k = (rotate(y, positions, Rope(self.config.rope_theta)) for y in (q, k))
        q, decay = q * q.shape[-1] ** -0.5, log_decays(heads, x)[:, None].expand(*q.shape[:3], 1)
        out = run_recurrence(gated_attention, q, k, v, decay, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.sizes[2] * self.config.head_width
