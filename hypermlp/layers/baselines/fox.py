"""Forgetting attention: softmax attention whose scores decay by data-dependent forget gates.

Shapes: B batch, T new positions, S positions so far, H heads, C their width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig
from hypermlp.layers.baselines.parts import at_least_float32, causal_pairs, full_precision, split_heads
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class FoxConfig(MultiHeadConfig):
    """Settings of ``fox``."""

    name = "fox"
    heads = Heads(width=64)


@full_precision
def forgetting_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
    """Read the values: ``[B, H, T, C], [B, H, S, C], [B, H, S, C] -> [B, H, T, C]``.

    Args:
        gates: ``[B, H, S]``, the logarithms of the forget gates.
        mask: bool, which of the S positions each new position sees, ``[B or 1, 1, T, S]``.
    """
    forgotten = at_least_float32(gates).cumsum(dim=-1)
    decay = forgotten[..., -q.shape[2] :, None] - forgotten[..., None, :]
    scores = at_least_float32((q * q.shape[-1] ** -0.5) @ k.mT) + decay
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.to(v.dtype) @ v


class ForgettingAttention(Baseline[FoxConfig]):
    """Softmax attention with a forget gate, as in the Forgetting Transformer (FoX), without other positions.

    For each head::

        f[t] = sigmoid(x[t] · w_f + b_f)
        o[t] = sum over j <= t of softmax_j(q[t] · k[j] / sqrt(C) + log f[j + 1] + ... + log f[t]) v[j]
        y[t] = o[t] W_o

    Paper: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate" (2025).

    Settings: ``num_heads`` (default: heads of width 64).
    """

    recurrent = False

    def build(self, config: FoxConfig) -> None:
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.forget_proj = nn.Linear(config.hidden_size, config.num_heads)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        q, k, v = split_heads(self.config.num_heads, *self.qkv_proj(x).chunk(3, dim=-1))
        gates = self.forget_proj(x)
        gates = F.logsigmoid(at_least_float32(gates)).to(gates.dtype)  # [B, T, H]
        if state is not None:
            k, v, gates = (
                state.extended(name, new) for name, new in (("keys", k), ("values", v), ("gates", gates))
            )
        q, k, v, gates = (y.transpose(1, 2) for y in (q, k, v, gates))
        out = forgetting_attention(q, k, v, gates, visibility.mask())
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out)

    def core_flops(self, queries: int, keys: int) -> int:
        return 2 * causal_pairs(queries, keys) * 2 * self.config.hidden_size
