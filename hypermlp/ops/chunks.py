"""A sliding window in chunks: for backends that compute every key for every query.

The queries are cut into chunks, and the chunks become sequences of a larger batch. Each has the keys of its
own positions and of window - 1 positions before them, so time and memory are linear in the number of queries.
The window is a number of Python: nothing is read back from a device.

Shapes: B batch, Tq queries, Tk keys, C queries of a chunk, n chunks, W window.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.ops.arguments import Attention

MIN_QUERIES = 64  # of a chunk


def attend_in_chunks(operator: Callable[[Attention], Tensor], arguments: Attention, window: int) -> Tensor:
    """Run ``operator`` on chunks; ``starts`` lets each query see at most ``window`` positions."""
    q, k, v, mix1, mix2, starts = arguments[:6]
    assert starts is not None
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    size = max(MIN_QUERIES, window)
    before = keys - queries  # positions before the first query
    if queries <= size or before >= window:
        return operator(arguments)
    count = -(-queries // size)
    after = count * size - queries

    def chunks_of_queries(x: Tensor) -> Tensor:
        """``[B, Tq, ...] -> [B n, C, ...]``"""
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, after))
        return padded.unflatten(1, (count, size)).flatten(0, 1)

    def chunks_of_keys(x: Tensor) -> Tensor:
        """``[B, Tk, ...] -> [B n, W - 1 + C, ...]``"""
        padded = F.pad(x, (0, 0, 0, 0, window - 1 - before, after))
        return padded.unfold(1, window - 1 + size, size).movedim(-1, 2).flatten(0, 1)

    chunk = torch.arange(count, device=q.device).repeat(batch)[:, None]
    # Counted from the first key of the chunk. Queries that only fill the last chunk see nothing.
    own_starts = chunks_of_queries(starts) + (window - 1 - before) - chunk * size
    position = window - 1 + torch.arange(size, device=q.device)
    exists = chunk * size + torch.arange(size, device=q.device) < queries
    own_starts = torch.where(exists, own_starts, position + 1)
    mixes = [mix and mix._replace(gate=chunks_of_queries(mix.gate)) for mix in (mix1, mix2)]
    out = operator(
        arguments._replace(
            q=chunks_of_queries(q),
            k=chunks_of_keys(k),
            v=chunks_of_keys(v),
            mix1=mixes[0],
            mix2=mixes[1],
            starts=own_starts,
        )
    )
    return out.unflatten(0, (batch, count)).flatten(1, 2)[:, :queries]
