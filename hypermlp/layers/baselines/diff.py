"""Differential attention: two softmax maps, one subtracted from the other.

Shapes: B batch, T new positions, S positions so far, H heads, C the width of a map; each head has two maps.
"""

import torch
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, RotaryConfig
from hypermlp.layers.baselines.parts import at_least_float32, causal_pairs, softmax_attention
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class DiffConfig(RotaryConfig):
    """Settings of ``diff``."""

    name = "diff"
    heads = Heads(width=128, multiple=4)  # two maps of an even width each

    lambda_init: float = 0.8
    """Share of the second map that is subtracted at first. In the paper it grows with depth, or is 0.8."""


class DifferentialAttention(Baseline[DiffConfig]):
    """Differential attention with rotary positions.

    For each head, with softmax attention maps A1 and A2 of its two pairs of queries and keys of width C::

        o[t] = (1 - lambda_init) RMSNorm(A1[t] V - s A2[t] V)         no weights in the norm
        s = exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init
        y[t] = o[t] W_o

    Paper: Ye et al., "Differential Transformer" (2024).

    Settings: ``num_heads`` (default: heads with two maps of width 64), ``lambda_init`` (0.8), ``rope_theta``
    (10,000).
    """

    recurrent = False
    undecayed = ("lambda_q", "lambda_k")

    def build(self, config: DiffConfig) -> None:
        hidden, self.width = config.hidden_size, config.head_width // 2
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.lambda_q, self.lambda_k = (nn.Parameter(torch.empty(2, self.width)) for _ in range(2))
        self.norm = nn.RMSNorm(2 * self.width, eps=1e-5, elementwise_affine=False)

    def initial_values(self) -> dict[str, Tensor]:
        return {name: 0.1 * torch.randn(2, self.width) for name in ("lambda_q", "lambda_k")}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        positions = visibility.stream()[None]
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        q, k = (
            rotate(y.unflatten(-1, (-1, self.width)), positions, Rope(self.config.rope_theta)) for y in (q, k)
        )
        # Maps h and H + h are those of head h; so are these parts of the values.
        v = v.unflatten(-1, (2, self.config.num_heads, self.width)).transpose(2, 3).flatten(3)
        if state is not None:
            k, v = state.extended("keys", k), state.extended("values", v)
        both = v.transpose(1, 2).repeat(1, 2, 1, 1)  # [B, 2 H, S, 2 C]
        out = softmax_attention(q.transpose(1, 2), k.transpose(1, 2), both, visibility)
        first, second = out.chunk(2, dim=1)
        plus, minus = (at_least_float32(self.lambda_q) * self.lambda_k).sum(-1).exp()
        share = (plus - minus + self.config.lambda_init).to(x.dtype)
        out = (1 - self.config.lambda_init) * self.norm(first - share * second)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return 2 * causal_pairs(queries, keys, self.window) * 3 * self.config.hidden_size
