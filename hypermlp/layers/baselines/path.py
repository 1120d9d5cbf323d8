"""PaTH attention: softmax attention whose positions are products of Householder-like matrices.

Shapes: B batch, T new positions, S positions so far, H heads, C their width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.base import Baseline, Heads, MultiHeadConfig
from hypermlp.layers.baselines.parts import (
    at_least_float32,
    causal_pairs,
    full_precision,
    initial_uniform,
    remembered,
    short_conv,
    split_heads,
)
from hypermlp.layers.baselines.recurrence import solve_unit_lower
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class PathConfig(MultiHeadConfig):
    """Settings of ``path``."""

    name = "path"
    heads = Heads(width=64)

    rank: int = 32
    """Rank of the matrix that makes the directions w."""
    conv_kernel: int = 3
    """Taps of the convolution on the directions."""


@full_precision
def path_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores ``q[i] M[i] M[i-1] ... M[j+1] k[j]'`` with ``M[s] = I - beta[s] w[s]' w[s]``.

    Args:
        q, w: ``[B, H, T, C]``, of the new positions.
        k: ``[B, H, S, C]``. Keys before the new positions have been multiplied by all earlier M.
        beta: ``[B, H, T, 1]``.

    Returns:
        The scores, ``[B, H, T, S]``, meaningful where j <= i; and k multiplied by all M, ``[B, H, S, C]``.
    """
    q, k, w, beta = (at_least_float32(x) for x in (q, k, w, beta))
    past = k.shape[2] - q.shape[2]
    products = w @ k.mT  # [B, H, T, S]; a key is multiplied by the M of later positions only
    later = torch.cat([products[..., :past], products[..., past:].tril(-1)], dim=-1)
    corrections = solve_unit_lower((beta * (w @ w.mT)).tril(-1), beta * later)
    return q @ k.mT - (q @ w.mT).tril() @ corrections, k - corrections.mT @ w


class PathAttention(Baseline[PathConfig]):
    """PaTH attention.

    For each head of width C, with directions w = conv(x W_1 W_2) through SiLU, of norm 1::

        o[t] = sum over j <= t of softmax_j(q[t] M[t] M[t-1] ... M[j+1] k[j]' / sqrt(C)) v[j]
        M[s] = I - b[s] w[s]' w[s]           b[s] = 2 sigmoid(x[s] W_b)
        y[t] = o[t] W_o

    Every new position changes all cached keys, and earlier keys cannot be restored, so the layer counts as
    recurrent.

    Paper: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations"
    (2025).

    Settings: ``num_heads`` (default: heads of width 64), ``rank`` (32), ``conv_kernel`` (3).
    """

    def build(self, config: PathConfig) -> None:
        hidden = config.hidden_size
        self.sizes = [hidden, hidden, hidden, config.rank, config.num_heads]  # q, k, v, directions, beta
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.direction_proj = nn.Linear(config.rank, hidden, bias=False)
        self.conv = nn.Parameter(torch.empty(hidden, config.conv_kernel))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        return {"conv": initial_uniform(self.conv.shape, self.config.conv_kernel)}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, low_rank, beta = self.in_proj(x).split(self.sizes, dim=-1)
        w = F.silu(short_conv(self.direction_proj(low_rank), self.conv, state, visibility.reach))
        q, k, v, w = (y.transpose(1, 2) for y in split_heads(self.config.num_heads, *qkv, w))
        w, beta = F.normalize(w, dim=-1), 2 * torch.sigmoid(beta)
        if state is None and kernels.usable(q, visibility.reach):
            return self.o_proj(kernels.path_attention(q, k, v, w, beta).flatten(2))
        past = remembered(state, "keys")
        k = k if past is None else torch.cat([past.to(k.dtype), k], dim=2)
        scores, keys = path_scores(q, k, w, beta.mT[..., None])
        if state is not None:
            v = state.extended("values", v.transpose(1, 2)).transpose(1, 2)
            state["keys"] = keys
        lowest = torch.finfo(scores.dtype).min
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(~visibility.mask(), lowest)
        return self.o_proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        """Count five products of width C for each pair: score, readout, and three for the correction."""
        return 2 * causal_pairs(queries, keys) * 5 * self.config.hidden_size
