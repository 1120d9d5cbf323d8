"""Linear attention: a product of positive features in the place of softmax's exponential."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import split_heads
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class LinearConfig(MultiHeadConfig):
    """Settings of ``linear``."""

    name = "linear"
    heads = Heads(width=64)


class LinearAttention(Baseline[LinearConfig]):
    """Linear attention with the features ``f(x) = elu(x) + 1``.

    For each head of width C::

        S[t] = S[t-1] + f(k[t])' v[t]
        o[t] = f(q[t]) S[t] / sqrt(C)
        y[t] = RMSNorm(o[t]) W_o           the paper divides by the sum of the weights instead

    Paper: Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention" (2020).

    Settings: ``num_heads`` (default: heads of width 64).
    """

    def build(self, config: LinearConfig) -> None:
        hidden = config.hidden_size
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(config.head_width, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, visibility.hide_padding(F.elu(k) + 1)  # the feature of a zero is 1
        q, k, v = split_heads(self.config.num_heads, q, k, v)
        q, no_decay = q * q.shape[-1] ** -0.5, torch.zeros_like(q[..., :1])
        out = run_recurrence(gated_attention, q, k, v, no_decay, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * self.config.head_width
