"""HGRN2: HGRN with a matrix for memory; keys are what the forget gates leave."""

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
class Hgrn2Config(BaselineConfig):
    name = "hgrn2"

    num_heads: int = 0
    """0 stands for heads of width 128."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=128)


class Hgrn2(Baseline):
    """No lower bound of the forget gates, which the paper learns over all layers of a model together."""

    config: Hgrn2Config
    Config: ClassVar = Hgrn2Config

    def __init__(self, config: Hgrn2Config):
        super().__init__(config)
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)  # q, forget gate, v
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        q, forget, v = self.in_proj(x).chunk(3, dim=-1)
        decay = F.logsigmoid(forget)
        k = torch.sigmoid(-forget)  # 1 - exp(decay)
        q, k, v, decay = (y.unflatten(-1, (self.config.num_heads, -1)) for y in (F.silu(q), k, v, decay))
        out, memory = gated_attention(
            q * q.shape[-1] ** -0.5, k, v, decay, remembered(state, "memory"), visibility.reach
        )
        if state is not None:
            state["memory"] = memory
        return self.o_proj(self.norm(out.to(x.dtype).flatten(2)))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * (self.config.hidden_size // self.config.num_heads)
