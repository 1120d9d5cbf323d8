"""RWKV-7's time mix: a memory whose rows decay on their own, and in which each key overwrites.

Shapes: B batch, T positions, D hidden size, H heads, C their width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.parts import shifted
from hypermlp.layers.baselines.recurrence import diagonal_plus_rank_one
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility

STRONGEST_DECAY = -0.606531  # -exp(-1/2), in logs
MIXED = (
    "read",
    "decay",
    "key",
    "value",
    "rate",
    "gate",
)  # what blends each position with the one before, in this order


def _rank(hidden_size: int, factor: float, power: float) -> int:
    """The published rule for the small matrices, in steps of 32."""
    return max(32, 32 * round(factor * hidden_size**power / 32))


@dataclass(frozen=True, kw_only=True)
class Rwkv7Config(BaselineConfig):
    name = "rwkv7"

    num_heads: int = 0
    """0 stands for heads of width 64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=64)


class _Small(nn.Module):
    """Two thin matrices with something between them."""

    def __init__(self, width: int, rank: int, activation: nn.Module):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.activation = activation
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.activation(self.down(x)))
        return out


class Rwkv7(Baseline):
    """The first layer's form:

    later layers of the published model also blend their values with the first layer's.
    """

    config: Rwkv7Config
    Config: ClassVar = Rwkv7Config
    undecayed = ("blend",)

    def __init__(self, config: Rwkv7Config):
        super().__init__(config)
        hidden = config.hidden_size
        self.blend = nn.Parameter(torch.empty(len(MIXED), hidden))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.decay = _Small(hidden, _rank(hidden, 1.8, 0.5), nn.Tanh())
        self.rate = _Small(hidden, _rank(hidden, 1.8, 0.5), nn.Identity())
        self.gate = _Small(hidden, _rank(hidden, 0.6, 0.8), nn.Sigmoid())
        self.decay_bias, self.rate_bias, self.removal, self.rate_on_key, self.bonus = (
            nn.Parameter(torch.empty(hidden)) for _ in range(5)
        )
        self.norm = nn.GroupNorm(config.num_heads, hidden, eps=64e-5)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        hidden = self.config.hidden_size
        along = torch.linspace(0, 1, hidden)
        return {
            "blend": torch.full_like(self.blend, 0.5, device="cpu"),
            "decay_bias": -6.5 + 6 * along**0.9,  # from slow to fast
            "rate_bias": torch.zeros(hidden),
            "removal": torch.full((hidden,), 0.85),
            "rate_on_key": torch.ones(hidden),
            "bonus": torch.zeros(hidden),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        change = shifted(x, state, visibility.reach) - x
        for_read, for_decay, for_key, for_value, for_rate, for_gate = (
            x + change * share for share in self.blend
        )
        r, k, v = self.r_proj(for_read), self.k_proj(for_key), self.v_proj(for_value)
        log_decay = STRONGEST_DECAY * torch.sigmoid(self.decay(for_decay) + self.decay_bias)
        rate = torch.sigmoid(self.rate(for_rate) + self.rate_bias)
        removed = self._heads(k * self.removal)
        k = k * (1 + (rate - 1) * self.rate_on_key)
        r, k, v, rate, log_decay = (self._heads(y) for y in (r, k, v, rate, log_decay))
        removed = F.normalize(removed, dim=-1)
        out, memory = diagonal_plus_rank_one(
            r, k, v, -removed, removed * rate, log_decay, remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        normed = self.norm(out.to(x.dtype).flatten(0, 1).flatten(1)).view(*x.shape)
        own = (r * k * self._heads(self.bonus)).sum(-1, keepdim=True) * v
        return self.o_proj((normed + own.flatten(2)) * self.gate(for_gate))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_heads, -1))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 8 * self.config.hidden_size * (self.config.hidden_size // self.config.num_heads)
