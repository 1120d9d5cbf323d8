"""Softmax attention with rotary positions, in PyTorch's fused kernel (``softmax``) or written out
(``softmax-naive``).

Shapes: B batch, T new positions, S positions so far, H heads, C their width.
"""

import torch
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, RotaryConfig
from hypermlp.layers.baselines.parts import causal_pairs, softmax_attention, split_heads
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility
from hypermlp.validation import require


class SoftmaxConfig(RotaryConfig):
    """Settings of ``softmax``."""

    name = "softmax"
    heads = Heads(width=64, multiple=2)


class Softmax(Baseline[SoftmaxConfig]):
    """Softmax attention with rotary positions.

    For each head::

        o[t] = sum over j <= t of softmax_j(rotate(q[t]) · rotate(k[j]) / sqrt(C)) v[j]
        y[t] = o[t] W_o

    Papers: Vaswani et al., "Attention Is All You Need" (2017); Su et al., "RoFormer: Enhanced Transformer
    with Rotary Position Embedding" (2021).

    Settings: ``num_heads`` (default: heads of width 64), ``rope_theta`` (10,000).
    """

    recurrent = False

    def build(self, config: SoftmaxConfig) -> None:
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions = visibility.stream()[None]
        q, k, v = split_heads(self.config.num_heads, *self.qkv_proj(x).chunk(3, dim=-1))
        q, k = (rotate(y, positions, Rope(self.config.rope_theta)) for y in (q, k))
        if state is not None:
            k, v = state.extended("keys", k), state.extended("values", v)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visibility)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        """Read the values: ``[B, H, T, C], [B, H, S, C], [B, H, S, C] -> [B, H, T, C]``."""
        return softmax_attention(q, k, v, visibility)

    def core_flops(self, queries: int, keys: int) -> int:
        return 2 * causal_pairs(queries, keys, self.window) * 2 * self.config.hidden_size


class SoftmaxNaiveConfig(SoftmaxConfig):
    """Settings of ``softmax-naive``."""

    name = "softmax-naive"

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "None: softmax-naive computes all scores; softmax is the same function with a window"
        require("sliding_window", self.sliding_window, self.sliding_window is None, allowed)


class SoftmaxNaive(Softmax):
    """``Softmax`` with the whole matrix of scores in memory, which the paper calls the naive kernel."""

    Config = SoftmaxNaiveConfig

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        scores = scores.masked_fill(~visibility.mask(), torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return weights.to(v.dtype) @ v
