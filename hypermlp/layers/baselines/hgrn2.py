"""HGRN2: HGRN with a matrix as its memory; the key is one minus the forget gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig, run_recurrence
from hypermlp.layers.baselines.parts import split_heads
from hypermlp.layers.baselines.recurrence import gated_attention
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class Hgrn2Config(MultiHeadConfig):
    """Settings of ``hgrn2``."""

    name = "hgrn2"
    heads = Heads(width=128)


class Hgrn2(Baseline[Hgrn2Config]):
    """HGRN2's recurrence.

    For each head of width C::

        S[t] = Diag(f[t]) S[t-1] + (1 - f[t])' v[t]         f[t] = sigmoid(x[t] W_f)
        o[t] = silu(q[t]) S[t] / sqrt(C)
        y[t] = RMSNorm(o[t]) W_o                            over all heads together

    The paper's forget gates have a lower bound that is learned over all layers of a model together.

    Paper: Qin et al., "HGRN2: Gated Linear RNNs with State Expansion" (2024).

    Settings: ``num_heads`` (default: heads of width 128).
    """

    def build(self, config: Hgrn2Config) -> None:
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)  # q, forget gate, v
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        q, forget, v = split_heads(self.config.num_heads, *self.in_proj(x).chunk(3, dim=-1))
        q, k = F.silu(q) * q.shape[-1] ** -0.5, torch.sigmoid(-forget)  # k is 1 - f
        decay = F.logsigmoid(forget)
        out = run_recurrence(gated_attention, q, k, v, decay, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype).flatten(2)))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 4 * self.config.hidden_size * self.config.head_width
