"""Differential attention: two softmax maps, one subtracted from the other.

Shapes: B batch, T new positions, S positions so far, H maps (two for each head), C their width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig
from hypermlp.layers.baselines.parts import causal_pairs
from hypermlp.layers.rotary import rotate
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class DiffConfig(BaselineConfig):
    name = "diff"

    num_heads: int = 0
    """Each has two maps; 0 stands for maps of width 64."""
    lambda_init: float = 0.8
    """How much of the second map is subtracted at first.

    The paper lets it grow with depth, or takes 0.8 everywhere.
    """
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=128, multiple=4)


class DifferentialAttention(Baseline):
    recurrent = False
    config: DiffConfig
    Config: ClassVar = DiffConfig
    undecayed = ("lambda_q", "lambda_k")

    def __init__(self, config: DiffConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.width = hidden // (2 * config.num_heads)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.lambda_q, self.lambda_k = (nn.Parameter(torch.empty(2, self.width)) for _ in range(2))
        self.norm = nn.RMSNorm(2 * self.width, eps=1e-5, elementwise_affine=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {name: 0.1 * torch.randn(2, self.width) for name in ("lambda_q", "lambda_k")}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions = visibility.stream()[None]
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        q, k = (rotate(y.unflatten(-1, (-1, self.width)), positions, self.config.rope_theta) for y in (q, k))
        # Maps h and h + H / 2 belong together; so do their halves of the values.
        v = v.unflatten(-1, (2, self.config.num_heads, self.width)).transpose(2, 3).flatten(3)
        if state is not None:
            k, v = state.extended("keys", k), state.extended("values", v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).repeat(1, 2, 1, 1)
        mask = None if visibility.reach is None and q.shape[2] in (1, k.shape[2]) else visibility.mask()
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1
        )
        first, second = out.chunk(2, dim=1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        plus, minus = (self.lambda_q.to(dtype) * self.lambda_k).sum(-1).exp()
        share = (plus - minus + self.config.lambda_init).to(x.dtype)
        out = (1 - self.config.lambda_init) * self.norm(first - share * second)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return 2 * causal_pairs(queries, keys) * 3 * self.config.hidden_size
