"""PaTH attention: softmax attention whose positions are products of input-dependent Householder-like
matrices.

Shapes: B batch, T new positions, S positions so far, H heads, C their width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.parts import (
    causal_pairs,
    full_precision,
    initial_conv,
    short_conv,
)
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class PathConfig(BaselineConfig):
    name = "path"

    num_heads: int = 0
    """0 stands for heads of width 64."""
    rank: int = 32
    """Of the two matrices that make the directions."""
    conv_kernel: int = 3
    """Taps of the convolution on the directions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose_heads(width=64)


@full_precision
def path_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """``q[i]' M[i] M[i-1] ... M[j+1] k[j]`` with ``M[s] = I - beta[s] w[s] w[s]'``, and the keys behind all
    of these.

    ``q``, ``w``: ``[B, H, T, C]`` of new positions, ``beta``: ``[B, H, T, 1]``; ``k``: ``[B, H, S, C]``,
    those before the new ones already behind all earlier M. Returns ``[B, H, T, S]``, meaningful for ``j <=
    i``, and ``[B, H, S, C]``.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, w, beta = (x.to(dtype) for x in (q, k, w, beta))
    new, past = q.shape[2], k.shape[2] - q.shape[2]
    products = w @ k.mT  # [B, H, T, S]; a key meets the M of later positions only
    later = torch.cat([products[..., :past], products[..., past:].tril(-1)], dim=-1)
    system = (beta * (w @ w.mT)).tril(-1) + torch.eye(new, dtype=w.dtype, device=w.device)
    corrections = torch.linalg.solve_triangular(system, beta * later, upper=False, unitriangular=True)
    return q @ k.mT - (q @ w.mT).tril() @ corrections, k - corrections.mT @ w


class PathAttention(Baseline):
    """Keys change with every position, so it counts as recurrent:

    a window would have to take back what they went through.
    """

    config: PathConfig
    Config: ClassVar = PathConfig

    def __init__(self, config: PathConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.sizes = [hidden, hidden, hidden, config.rank, config.num_heads]  # q, k, v, directions, beta
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.direction_proj = nn.Linear(config.rank, hidden, bias=False)
        self.conv = nn.Parameter(torch.empty(hidden, config.conv_kernel))
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"conv": initial_conv(*self.conv.shape)}

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        *qkv, low, beta = self.in_proj(x).split(self.sizes, dim=-1)
        w = F.silu(short_conv(self.direction_proj(low), self.conv, state, "conv", visibility.reach))
        q, k, v, w = (y.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for y in (*qkv, w))
        w = F.normalize(w, dim=-1)
        beta = 2 * torch.sigmoid(beta)
        if state is None and kernels.usable(q, visibility.reach):
            return self.o_proj(kernels.path_attention(q, k, v, w, beta).flatten(2))
        past = remembered(state, "keys")
        if state is not None:
            v = state.extended("values", v.transpose(1, 2)).transpose(1, 2)
        scores, keys = path_scores(
            q, k if past is None else torch.cat([past.to(k.dtype), k], dim=2), w, beta.mT[..., None]
        )
        if state is not None:
            state["keys"] = keys
        seen = visibility.mask()
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(~seen, torch.finfo(scores.dtype).min)
        return self.o_proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))

    def core_flops(self, queries: int, keys: int) -> int:
        """Scores, readout, and for each pair the correction:

        a product with the direction and a row of the triangular system.
        """
        return 2 * causal_pairs(queries, keys) * 5 * self.config.hidden_size
