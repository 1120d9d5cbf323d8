"""Softmax attention with rotary positions, around PyTorch's fused kernel (``softmax``) or written out
(``softmax-naive``).

Shapes: B batch, T new positions, S positions so far, H heads, C their width.
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
class SoftmaxConfig(BaselineConfig):
    name = "softmax"

    num_heads: int = 0
    """0 stands for heads of width 64."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=64, multiple=2)


class Softmax(Baseline):
    recurrent = False
    config: SoftmaxConfig
    Config: ClassVar = SoftmaxConfig

    def __init__(self, config: SoftmaxConfig):
        super().__init__(config)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.reset_parameters()

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions = visibility.stream()[None]
        q, k, v = (y.unflatten(-1, (self.config.num_heads, -1)) for y in self.qkv_proj(x).chunk(3, dim=-1))
        q, k = (rotate(y, positions, self.config.rope_theta) for y in (q, k))
        if state is not None:
            k, v = state.extended("keys", k), state.extended("values", v)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visibility)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        """``[B, H, T, C], [B, H, S, C], [B, H, S, C] -> [B, H, T, C]``"""
        if visibility.reach is None and (q.shape[2] == k.shape[2] or q.shape[2] == 1):
            return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visibility.mask())

    def core_flops(self, queries: int, keys: int) -> int:
        return 2 * causal_pairs(queries, keys) * 2 * self.config.hidden_size


class SoftmaxNaiveConfig(SoftmaxConfig):
    name = "softmax-naive"


class SoftmaxNaive(Softmax):
    """The matrix of scores is made, which costs memory; what the paper calls the naive kernel."""

    Config: ClassVar = SoftmaxNaiveConfig

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        seen = visibility.mask()
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(
            dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
        )
        return weights.to(v.dtype) @ v
