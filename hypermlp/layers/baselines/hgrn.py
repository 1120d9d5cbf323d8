"""HGRN: a gated recurrence of single numbers."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.scan import scan
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class HgrnConfig(BaselineConfig):
    name = "hgrn"


class Hgrn(Baseline):
    """No lower bound of the forget gates, which the paper learns over all layers of a model together."""

    config: HgrnConfig
    Config: ClassVar = HgrnConfig

    def __init__(self, config: HgrnConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)  # input, forget gate, output gate
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        new, forget, gate = self.in_proj(x).chunk(3, dim=-1)
        forget = torch.sigmoid(forget.to(dtype))
        new = F.silu(new.to(dtype)) * (1 - forget)
        past = remembered(state, "memory")
        states = scan(
            forget,
            new,
            new.new_zeros(new.shape[0], new.shape[2]) if past is None else past.to(dtype),
            visibility.reach,
        )
        if state is not None:
            state["memory"] = states[:, -1].clone()
        return self.o_proj(self.norm(states.to(x.dtype)) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 2 * self.config.hidden_size
