"""RWKV-7's time mix: the rows of the memory decay at rates of their own, and a key replaces its old value.

Shapes: B batch, T positions, D hidden size, H heads, C their width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import shifted, split_heads
from hypermlp.layers.baselines.recurrence import diagonal_plus_rank_one
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

STRONGEST_DECAY = -0.606531  # logarithm of the strongest decay: -exp(-1/2)
NUM_BLENDS = 6  # inputs that blend each position with the one before: read, decay, key, value, rate, gate


def _rank(hidden_size: int, factor: float, power: float) -> int:
    """Return the rank of a low-rank map by the published rule, in steps of 32."""
    return max(32, 32 * round(factor * hidden_size**power / 32))


class Rwkv7Config(MultiHeadConfig):
    """Settings of ``rwkv7``."""

    name = "rwkv7"
    heads = Heads(width=64)


class _LowRank(nn.Module):
    """Two thin matrices with an activation between them."""

    def __init__(self, width: int, rank: int, activation: nn.Module):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.activation = activation
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.activation(self.down(x)))


class Rwkv7(Baseline[Rwkv7Config]):
    """RWKV-7's time mix, in the form of its first layer.

    Each input below is x[t] + (x[t-1] - x[t]) * blend, with a learned blend of its own. For each head::

        S[t] = (Diag(a[t]) - (e[t] * p[t])' e[t]) S[t-1] + k[t]' v[t]
        o[t] = r[t] S[t]
        y[t] = ((GroupNorm(o[t]) + (r[t] * bonus · k[t]) v[t]) * gate[t]) W_o

    where r, v and key are linear maps of their inputs; e = normalize(key * removal) is what is replaced, at
    the rate p = sigmoid(low rank); k = key * (1 + (p - 1) * rate_on_key); the decay is
    a = exp(-exp(-1/2) sigmoid(low rank)); gate is low-rank too. Later layers of the published model also
    blend their values with those of the first layer.

    Paper: Peng et al., "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (2025).

    Settings: ``num_heads`` (default: heads of width 64).
    """

    undecayed = ("blend",)

    def build(self, config: Rwkv7Config) -> None:
        hidden = config.hidden_size
        self.blend = nn.Parameter(torch.empty(NUM_BLENDS, hidden))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.decay = _LowRank(hidden, _rank(hidden, 1.8, 0.5), nn.Tanh())
        self.rate = _LowRank(hidden, _rank(hidden, 1.8, 0.5), nn.Identity())
        self.gate = _LowRank(hidden, _rank(hidden, 0.6, 0.8), nn.Sigmoid())
        self.decay_bias, self.rate_bias, self.removal, self.rate_on_key, self.bonus = (
            nn.Parameter(torch.empty(hidden)) for _ in range(5)
        )
        self.norm = nn.GroupNorm(config.num_heads, hidden, eps=64e-5)

    def initial_values(self) -> dict[str, Tensor]:
        hidden = self.config.hidden_size
        return {
            "blend": torch.full((NUM_BLENDS, hidden), 0.5),
            "decay_bias": -6.5 + 6 * torch.linspace(0, 1, hidden) ** 0.9,  # from slow to fast
            "rate_bias": torch.zeros(hidden),
            "removal": torch.full((hidden,), 0.85),
            "rate_on_key": torch.ones(hidden),
            "bonus": torch.zeros(hidden),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        heads = self.config.num_heads
        change = shifted(x, state, visibility.reach) - x
        for_read, for_decay, for_key, for_value, for_rate, for_gate = (
            x + change * blend for blend in self.blend
        )
        r, k, v = self.r_proj(for_read), self.k_proj(for_key), self.v_proj(for_value)
        log_decay = STRONGEST_DECAY * torch.sigmoid(self.decay(for_decay) + self.decay_bias)
        rate = torch.sigmoid(self.rate(for_rate) + self.rate_bias)
        removed, k = k * self.removal, k * (1 + (rate - 1) * self.rate_on_key)
        r, k, v, rate, removed, log_decay = split_heads(heads, r, k, v, rate, removed, log_decay)
        removed = F.normalize(removed, dim=-1)
        inputs = r, k, v, -removed, removed * rate, log_decay
        out = run_recurrence(diagonal_plus_rank_one, *inputs, state=state, visibility=visibility)
        normed = self.norm(out.to(x.dtype).flatten(0, 1).flatten(1)).view(*x.shape)
        own = (r * k * self.bonus.unflatten(0, (heads, -1))).sum(-1, keepdim=True) * v
        return self.o_proj((normed + own.flatten(2)) * self.gate(for_gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 8 * self.config.hidden_size * self.config.head_width
