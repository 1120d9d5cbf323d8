"""Recurrences with a matrix as memory, in chunks: matrix products within a chunk, a loop over chunks.

Each function reads ``o[t] = q[t] S[t]`` from a memory S, and returns all o, ``[B, T, H, V]``, and the last S,
``[B, H, K, V]``. They differ in how S changes from one position to the next. All of them take q and k,
``[B, T, H, K]``, and v, ``[B, T, H, V]``. Vectors are rows, so ``k' v`` is a matrix. Everything is
computed in float32 at least.

Shapes: B batch, T positions, H heads, K and V widths of keys and values, N chunks of C positions.
"""

import copy
from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from hypermlp.layers.baselines import kernels
from hypermlp.layers.baselines.parts import Memory, Reach, at_least_float32, full_precision, starting_memory

SCALAR_CHUNK, CHANNEL_CHUNK = 64, 16  # positions in a chunk, for one decay of each head or of each channel
STRONGEST = -100.0  # exp(-100) is 0 in float32; stronger log decays would only cost their sums accuracy
LARGEST_EXPONENT = 40.0  # the product of two exponentials of it is still finite in float32


class Chunks:
    """A sequence cut into chunks: which rows of a chunk see each other, and how the memory decays along them.

    Attributes:
        pairs: bool ``[B or 1, 1, N or 1, C, C]``, True where row i sees row j of the same chunk.
        before: bool ``[B, 1, N, C, 1]``, True where row i sees what is before its chunk; None if all rows do.
        total: ``[B, H, N, C, K or 1]``, the sum of the log decays of the chunk up to row i, its own included.
        last: ``total`` of the last row.
        read: the sum of the log decays from the beginning of the chunk to where row i reads; here ``total``.
    """

    def __init__(self, log_decay: Tensor, reach: Reach):
        """``log_decay``: ``[B, T, H, 1]``, or ``[B, T, H, K]`` for one of each channel."""
        self.length = log_decay.shape[1]
        self.size = min(SCALAR_CHUNK if log_decay.shape[-1] == 1 else CHANNEL_CHUNK, self.length)
        self.log_decay = self.cut(log_decay)[0].clamp(min=STRONGEST)
        self.read = self.total = self.log_decay.cumsum(-2)
        self.last = self.total[..., -1:, :]
        index = torch.arange(self.size, device=log_decay.device)
        lag = index[:, None] - index
        self.pairs, self.before = (lag >= 0)[None, None, None], None
        if reach is not None:
            spare = torch.arange(1, -self.length % self.size + 1, device=reach.device)
            reach = torch.cat([reach, reach[:, -1:] + spare], dim=1)
            reach = reach.unflatten(1, (-1, self.size))[:, None, :, :, None]  # [B, 1, N, C, 1]
            self.pairs, self.before = self.pairs & (lag < reach), reach > index[:, None] + 1

    def cut(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in chunks, with zeros after the end: ``[B, T, H, *] -> [B, H, N, C, *]``."""
        spare = -self.length % self.size
        padded = (F.pad(at_least_float32(x), (0, 0, 0, 0, 0, spare)) for x in tensors)
        return tuple(x.unflatten(1, (-1, self.size)).permute(0, 3, 1, 2, 4) for x in padded)

    def join(self, x: Tensor) -> Tensor:
        """Undo ``cut``."""
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : self.length]

    def before_own_step(self) -> Self:
        """Return these chunks for reading S[t-1], before the decay and the write of each row's position."""
        other = copy.copy(self)
        other.read, other.pairs = self.total - self.log_decay, self.pairs.tril(-1)
        return other

    def from_past(self, x: Tensor) -> Tensor:
        """Decay ``x`` from the beginning of the chunk to each row; 0 in rows that see nothing before it."""
        return self._hide(x * self.read.exp(), self.before)

    def to_end(self, x: Tensor) -> Tensor:
        """Decay ``x`` from each row to the end of the chunk; 0 in rows that the last row does not see."""
        seen = None if self.before is None else self.pairs[..., -1, :, None]
        return self._hide(x * (self.last - self.total).exp(), seen)

    @property
    def kept(self) -> Tensor:
        """The share of the memory before each chunk that is left after it, ``[B, H, N, 1, K or 1]``."""
        seen = None if self.before is None else self.before[..., -1:, :]
        return self._hide(self.last.exp(), seen)

    def scores(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left[i] · right[j]``, decayed from row j to row i, where i sees j; else 0.

        ``[B, H, N, C, C]``.
        """
        if self.total.shape[-1] == 1:
            exponents = (self.read - self.total.mT).masked_fill(~self.pairs, -torch.inf)
            return (left @ right.mT) * exponents.exp()
        middle = self.middle
        if _factorable(self.read - middle) and _factorable(self.total - middle):
            product = (left * (self.read - middle).exp()) @ (right * (middle - self.total).exp()).mT
            return product.masked_fill(~self.pairs, 0)
        return torch.einsum("...ik,...jk,...ijk->...ij", left, right, self.decays())

    @property
    def middle(self) -> Tensor:
        """``total`` of the middle row. Exponents relative to it are small at both ends of the chunk."""
        return self.total[..., self.size // 2, None, :].detach()

    def decays(self) -> Tensor:
        """Return each channel's decay from row j to row i, ``[B, H, N, C, C, K]``; 0 if i does not see j."""
        exponents = self.read[..., :, None, :] - self.total[..., None, :, :]
        return exponents.masked_fill(~self.pairs[..., None], -torch.inf).exp()

    @staticmethod
    def _hide(x: Tensor, seen: Tensor | None) -> Tensor:
        return x if seen is None else x.masked_fill(~seen, 0)


def _factorable(exponents: Tensor) -> bool:
    """Return True if the exponentials can be separate factors of a product without overflow.

    If not, or while compiling, when values are unknown, a slower form is used, which is right for any decay.
    """
    if torch.compiler.is_compiling():
        return False
    if exponents.is_meta or is_fake(exponents):
        return True  # meta and fake tensors hold no values
    ends = exponents.detach()[..., [0, -1], :]  # sums of decays are monotonic
    return ends.abs().max().item() <= LARGEST_EXPONENT


@full_precision
def gated_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Memory = None, reach: Reach = None
) -> tuple[Tensor, Tensor]:
    """``S[t] = Diag(exp(g[t])) S[t-1] + k[t]' v[t]``.

    ``log_decay``, g: ``[B, T, H, 1]``, or ``[B, T, H, K]`` for one of each row of S.
    """
    if kernels.usable(q, reach):
        return kernels.gated_attention(q, k, v, log_decay, memory)
    chunks = Chunks(log_decay, reach)
    q, k, v = chunks.cut(q, k, v)
    memories, memory = _accumulate(memory, chunks.kept.mT, chunks.to_end(k).mT @ v)
    return chunks.join(chunks.scores(q, k) @ v + chunks.from_past(q) @ memories), memory


@full_precision
def gated_slots(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Memory = None, reach: Reach = None
) -> tuple[Tensor, Tensor]:
    """``S[t] = S[t-1] Diag(exp(g[t])) + k[t]' v[t]``.

    ``log_decay``, g: ``[B, T, H, V]``, one for each column of S.
    """
    chunks = Chunks(log_decay, reach)
    q, k, v = chunks.cut(q, k, v)
    memories, memory = _accumulate(memory, chunks.kept, k.mT @ chunks.to_end(v))
    scores, relative = (q @ k.mT).masked_fill(~chunks.pairs, 0), chunks.total - chunks.middle
    if _factorable(relative):
        own = relative.exp() * (scores @ (v * (-relative).exp()))
    else:
        own = torch.einsum("...ij,...jv,...ijv->...iv", scores, v, chunks.decays())
    return chunks.join(own + chunks.from_past(q @ memories)), memory


def _accumulate(memory: Memory, kept: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``S[n+1] = kept[n] * S[n] + added[n]`` over chunks n.

    Returns:
        The memories before each chunk, ``[B, H, N, K, V]``, and the memory after the last.
    """
    current = starting_memory(memory, added[:, :, 0])
    memories = []
    for keep, add in _by_chunk(kept, added):
        memories.append(current)
        current = torch.addcmul(add, keep, current)
    return torch.stack(memories, dim=2), current


def _by_chunk(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each chunk.

    ``unbind`` splits them at once: the gradient of a single slice would be a full tensor of zeros.
    """
    return zip(*(x.unbind(2) for x in tensors), strict=True)


@full_precision
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    memory: Memory = None,
    reach: Reach = None,
) -> tuple[Tensor, Tensor]:
    """``S[t] = exp(g[t]) (I - beta[t] k[t]' k[t]) S[t-1] + beta[t] k[t]' v[t]``.

    ``beta``, ``log_decay`` (g): ``[B, T, H, 1]``.

    Row i writes ``k[i]' u[i]`` with ``u[i] = beta[i] (v[i] - what k[i] reads)``. Within a chunk, k[i] reads
    what the rows before it write, so u solves a triangular system.
    """
    if kernels.usable(q, reach):
        return kernels.delta_rule(q, k, v, beta, log_decay, memory)
    chunks = Chunks(log_decay, reach)
    q, k, v, beta = chunks.cut(q, k, v, beta)
    system = chunks.scores(beta * k, k).tril(-1)
    nothing = k.new_zeros(()).expand(*k.shape[:3], k.shape[-1], v.shape[-1])
    return _solve_and_write(chunks, q, k, system, beta * v, -beta * chunks.from_past(k), nothing, memory)


@full_precision
def diagonal_plus_rank_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    memory: Memory = None,
    reach: Reach = None,
) -> tuple[Tensor, Tensor]:
    """``S[t] = (Diag(exp(g[t])) + b[t]' a[t]) S[t-1] + k[t]' v[t]``.

    ``a``, ``b``, ``log_decay`` (g): ``[B, T, H, K]``. As in ``delta_rule``, what the rows of a chunk read
    with their a solves a triangular system.
    """
    if kernels.usable(q, reach):
        return kernels.diagonal_plus_rank_one(q, k, v, a, b, log_decay, memory)
    chunks = Chunks(log_decay, reach)
    q, k, v, a, b = chunks.cut(q, k, v, a, b)
    earlier = chunks.before_own_step()
    system, own = -earlier.scores(a, b), earlier.scores(a, k) @ v
    added = chunks.to_end(k).mT @ v
    out, last = _solve_and_write(chunks, q, b, system, own, earlier.from_past(a), added, memory)
    return out + chunks.join(chunks.scores(q, k) @ v), last


def _solve_and_write(
    chunks: Chunks,
    q: Tensor,
    k: Tensor,
    system: Tensor,
    values: Tensor,
    readings: Tensor,
    added: Tensor,
    memory: Memory,
) -> tuple[Tensor, Tensor]:
    """Return what q reads of the writes ``k[i]' u[i]`` and of earlier chunks, and the last memory.

    In a chunk that finds the memory S, u solves ``(I + system) u = values + readings S``. The chunk also
    adds ``added``, ``[B, H, N, K, V]``, to the memory.
    """
    solved = solve_unit_lower(system, torch.cat([values, readings], dim=-1))
    values, readings = solved.split([values.shape[-1], readings.shape[-1]], dim=-1)
    scores, queries, keys = chunks.scores(q, k), chunks.from_past(q), chunks.to_end(k).mT
    current, outs = starting_memory(memory, added[:, :, 0]), []
    parts = _by_chunk(values, readings, scores, queries, chunks.kept.mT, added, keys)
    for value, reading, score, query, keep, add, key in parts:
        written = value + reading @ current
        outs.append(score @ written + query @ current)
        current = keep * current + add + key @ written
    return chunks.join(torch.stack(outs, dim=2)), current


def solve_unit_lower(strictly_lower: Tensor, right: Tensor) -> Tensor:
    """Solve ``(I + L) x = right`` for x."""
    identity = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    return torch.linalg.solve_triangular(strictly_lower + identity, right, upper=False, unitriangular=True)
