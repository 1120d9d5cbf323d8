"""The recurrences that peers are made of, in chunks: matrix products within a chunk, a short loop over
chunks.

Shapes: B batch, T positions, H heads, K and V widths of keys and values, N chunks of C positions. Memories
are ``[B, H, K, V]``.
``reach``: int64 ``[B, T]``, how many positions each one sees, itself included; None for all. A document
begins where it is 1. Everything is computed in float32 at least.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.parts import full_precision

SCALAR_CHUNK, CHANNEL_CHUNK = 64, 16
STRONGEST = -100.0  # what decays so is nothing in float32; stronger ones would only cost their sums accuracy
LARGEST_EXPONENT = 40.0  # a product of two such exponentials is still a float32


class Visible(NamedTuple):
    """Who sees whom within chunks."""

    pairs: Tensor  # bool [B or 1, 1, N or 1, C, C]: does row i see row j?
    before: Tensor | None  # [B, 1, N, C, 1], 1 where row i sees what was before its chunk; None: all do

    def keep(self, x: Tensor) -> Tensor:
        """Zero the rows ``[..., C, *]`` that do not see what was before their chunk."""
        return x if self.before is None else x * self.before.to(x.dtype)

    def keep_for_last(self, x: Tensor) -> Tensor:
        """Zero the rows that the chunk's last row does not see."""
        return x if self.before is None else x * self.pairs[..., -1, :, None].to(x.dtype)


def visible_in_chunks(reach: Tensor | None, length: int, size: int, device: torch.device) -> Visible:
    index = torch.arange(size, device=device)
    lag = index[:, None] - index
    if reach is None:
        return Visible((lag >= 0)[None, None, None], None)
    spare = -length % size
    reach = torch.cat([reach, reach[:, -1:] + torch.arange(1, spare + 1, device=device)], dim=1)
    reach = reach.unflatten(1, (-1, size))[:, None, :, :, None]  # [B, 1, N, C, 1]
    return Visible((lag >= 0) & (lag < reach), reach > index[:, None] + 1)


def in_chunks(x: Tensor, size: int) -> Tensor:
    """``[B, T, H, *] -> [B, H, N, C, *]``, zeros behind the end, float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)


def out_of_chunks(x: Tensor, length: int) -> Tensor:
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


def decayed_pairs(left: Tensor, right: Tensor, left_sum: Tensor, right_sum: Tensor, pairs: Tensor) -> Tensor:
    """``sum over k of left[i, k] * right[j, k] * exp(left_sum[i, k] - right_sum[j, k])`` for the pairs, else
    0. ``[..., C, C]``

    ``*_sum``: sums of log decays up to a row, ``[..., C, K or 1]``, never increasing.
    """
    if left_sum.shape[-1] == 1:
        decay = (left_sum - right_sum.mT).masked_fill(~pairs, -torch.inf).exp()
        return (left @ right.mT) * decay
    middle = right_sum[..., right_sum.shape[-2] // 2, None, :].detach()
    if _small(left_sum - middle) and _small(right_sum - middle):
        product = (left * (left_sum - middle).exp()) @ (right * (middle - right_sum).exp()).mT
        return product.masked_fill(~pairs, 0)
    decay = (
        (left_sum[..., :, None, :] - right_sum[..., None, :, :])
        .masked_fill(~pairs[..., None], -torch.inf)
        .exp()
    )
    return torch.einsum("...ik,...jk,...ijk->...ij", left, right, decay)


def _small(exponents: Tensor) -> bool:
    """Can they be taken apart into products? If not, or if it cannot be known, the slower form is right for
    any decay.
    """
    if torch.compiler.is_compiling():
        return False
    if exponents.is_meta or is_fake(exponents):
        return True  # nothing is computed, only its size matters
    ends = exponents.detach()[..., [0, -1], :]  # decays only add up
    return ends.abs().max().item() <= LARGEST_EXPONENT


@full_precision
def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    memory: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``S[t] = exp(g[t]) S[t-1] + k[t] v[t]'``, ``o[t] = q[t] S[t]``; returns all o, ``[B, T, H, V]``, and
    the last S.

    ``log_decay``: ``[B, T, H, 1]``, or ``[B, T, H, K]`` for one of each row of S.
    """
    if kernels.usable(q, reach):
        return kernels.gated_attention(q, k, v, log_decay, memory)
    length, size = q.shape[1], SCALAR_CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK
    size = min(size, length)
    q, k, v, log_decay = (in_chunks(x, size) for x in (q, k, v, log_decay))
    visible = visible_in_chunks(reach, length, size, q.device)
    log_decay = log_decay.clamp(min=STRONGEST)
    total = log_decay.cumsum(-2)  # within the chunk, own decay included
    last = total[..., -1:, :]
    own = decayed_pairs(q, k, total, total, visible.pairs) @ v
    added = visible.keep_for_last(k * (last - total).exp()).mT @ v  # [B, H, N, K, V]
    kept = (
        visible.keep(last.exp().expand_as(k))[..., -1, :, None]
        if visible.before is not None
        else last.exp().mT
    )
    memories, memory = _loop(memory, kept, added)
    return out_of_chunks(own + visible.keep(q * total.exp()) @ memories, length), memory


@full_precision
def gated_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    memory: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``gated_attention``, but each column of S has its own decay: ``log_decay`` is ``[B, T, H, V]``."""
    length, size = q.shape[1], min(CHANNEL_CHUNK, q.shape[1])
    q, k, v, log_decay = (in_chunks(x, size) for x in (q, k, v, log_decay))
    visible = visible_in_chunks(reach, length, size, q.device)
    log_decay = log_decay.clamp(min=STRONGEST)
    total = log_decay.cumsum(-2)
    last = total[..., -1:, :]
    scores = (q @ k.mT).masked_fill(~visible.pairs, 0)
    middle = total[..., size // 2, None, :].detach()
    if _small(total - middle):
        own = (total - middle).exp() * (scores @ (v * (middle - total).exp()))
    else:
        decay = (
            (total[..., :, None, :] - total[..., None, :, :])
            .masked_fill(~visible.pairs[..., None], -torch.inf)
            .exp()
        )
        own = torch.einsum("...ij,...jv,...ijv->...iv", scores, v, decay)
    added = k.mT @ visible.keep_for_last(v * (last - total).exp())
    kept = visible.keep(last.exp().expand_as(v))[..., -1:, :] if visible.before is not None else last.exp()
    memories, memory = _loop(memory, kept, added)
    return out_of_chunks(own + visible.keep(q) @ memories * total.exp(), length), memory


def _loop(memory: Tensor | None, kept: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """``S[n+1] = kept[n] S[n] + added[n]``:

    the memories before each chunk, ``[B, H, N, K, V]``, and the one behind all.
    """
    current = _begin(memory, added[:, :, 0])
    memories = []
    for keep, add in _each(kept, added):
        memories.append(current)
        current = torch.addcmul(add, keep, current)
    return torch.stack(memories, dim=2), current


def _begin(memory: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if memory is None else memory.to(like.dtype)


def _each(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunk by chunk. Taken apart at once:

    the gradient of single slices would be a full tensor of zeros for each.
    """
    return zip(*(x.unbind(2) for x in tensors), strict=True)


@full_precision
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    memory: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``S[t] = exp(g[t]) (I - beta[t] k[t] k[t]') S[t-1] + beta[t] k[t] v[t]'``, ``o[t] = q[t] S[t]``.
    ``beta``, ``g``: ``[B, T, H, 1]``

    Within a chunk, what row i writes is ``u[i] = beta[i] (v[i] - what its key reads)``, a triangular system
    in the rows before it.
    """
    if kernels.usable(q, reach):
        return kernels.delta_rule(q, k, v, beta, log_decay, memory)
    length, size = q.shape[1], min(SCALAR_CHUNK, q.shape[1])
    q, k, v, beta, log_decay = (in_chunks(x, size) for x in (q, k, v, beta, log_decay))
    visible = visible_in_chunks(reach, length, size, q.device)
    log_decay = log_decay.clamp(min=STRONGEST)
    total = log_decay.cumsum(-2)
    last = total[..., -1:, :]
    system = decayed_pairs(beta * k, k, total, total, visible.pairs).tril(-1)
    reads = visible.keep(k * total.exp())
    from_values, from_memory = _solve(system, beta * torch.cat([v, reads], dim=-1)).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    scores = decayed_pairs(q, k, total, total, visible.pairs)
    queries = visible.keep(q * total.exp())
    keys = visible.keep_for_last(k * (last - total).exp()).mT
    kept = last.exp() if visible.before is None else last.exp() * visible.before[..., -1:, :]
    current = _begin(memory, keys[:, :, 0] @ v[:, :, 0])
    outs = []
    for value, reading, score, query, keep, key in _each(
        from_values, from_memory, scores, queries, kept, keys
    ):
        written = value - reading @ current
        outs.append(score @ written + query @ current)
        current = keep * current + key @ written
    return out_of_chunks(torch.stack(outs, dim=2), length), current


@full_precision
def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    memory: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``S[t] = (Diag(exp(g[t])) + b[t] a[t]') S[t-1] + k[t] v[t]'``, ``o[t] = q[t] S[t]``.

    All but v are ``[B, T, H, K]``.
    """
    if kernels.usable(q, reach):
        return kernels.diagonal_plus_rank_one(q, k, v, a, b, log_decay, memory)
    length, size = q.shape[1], min(CHANNEL_CHUNK, q.shape[1])
    q, k, v, a, b, log_decay = (in_chunks(x, size) for x in (q, k, v, a, b, log_decay))
    visible = visible_in_chunks(reach, length, size, q.device)
    log_decay = log_decay.clamp(min=STRONGEST)
    total = log_decay.cumsum(-2)
    before = total - log_decay  # a reads S before the decay of its own step
    last = total[..., -1:, :]
    earlier = visible.pairs.tril(-1)
    system = -decayed_pairs(a, b, before, total, earlier)
    read_values = decayed_pairs(a, k, before, total, earlier) @ v
    reads = visible.keep(a * before.exp())
    from_values, from_memory = _solve(system, torch.cat([read_values, reads], dim=-1)).split(
        [v.shape[-1], a.shape[-1]], dim=-1
    )
    from_keys = decayed_pairs(q, k, total, total, visible.pairs) @ v
    from_writes = decayed_pairs(q, b, total, total, visible.pairs)
    queries = visible.keep(q * total.exp())
    keys, writes = (visible.keep_for_last(x * (last - total).exp()).mT for x in (k, b))
    added = keys @ v
    kept = last.exp().mT if visible.before is None else (last.exp() * visible.before[..., -1:, :]).mT
    current = _begin(memory, added[:, :, 0])
    outs = []
    parts = _each(from_values, from_memory, from_keys, from_writes, queries, kept, added, writes)
    for value, reading, own, through_writes, query, keep, add, write in parts:
        read = value + reading @ current  # a[t] S[t-1] of every row
        outs.append(own + through_writes @ read + query @ current)
        current = keep * current + add + write @ read
    return out_of_chunks(torch.stack(outs, dim=2), length), current


def _solve(strictly_lower: Tensor, right: Tensor) -> Tensor:
    """``(I + L) x = right``."""
    size = strictly_lower.shape[-1]
    unit = strictly_lower + torch.eye(size, dtype=strictly_lower.dtype, device=strictly_lower.device)
    return torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
