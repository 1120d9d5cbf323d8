"""Registers: learned rows that stand before every context, as if they were its oldest tokens.

By definition a layer with k registers is the layer without them, on an input that begins with those rows::

    layer(x) = plain_layer(cat([registers, x]))[k:]

and so for every context that ``starts`` makes: padded, packed or seen through a window, each has the registers at its far end.

Shapes: B batch, T new positions, S positions so far, G score branches, H heads, k registers, C contexts.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hypermlp.layers.common import causal_conv_pair
from hypermlp.ops.types import Mix

Operator = Callable[[Tensor, Tensor, Tensor, Mix | None, Mix | None, Tensor | None], Tensor]


def conv_of_registers(registers: Tensor, k_conv: Tensor, v_conv: Tensor) -> tuple[Tensor, Tensor]:
    """Both convolutions of the rows ``[k, D]`` and of zeros behind them: ``[k + taps - 1, D]`` each.

    The first k are the registers' own. The rest is what registers add to the first positions of a context, since a convolution
    of both, one behind the other, is the sum of those of each.
    """
    taps = k_conv.shape[1]
    rows = F.pad(registers, (0, 0, 0, taps - 1))[None]
    keys_from, values_from = causal_conv_pair(rows, k_conv, v_conv, rows.shape[1], backend="reference")
    return keys_from[0], values_from[0]


def add_overlap(convolved: Tensor, overlap: Tensor, reach: Tensor | None, past: int) -> Tensor:
    """Add ``overlap`` ``[taps - 1, D]`` to the first positions of every context; ``convolved``: ``[B, T, D]``."""
    length, last = convolved.shape[1], overlap.shape[0]
    if reach is None:
        head = overlap[past : past + length]
        return convolved + F.pad(head, (0, 0, 0, length - head.shape[0])) if head.shape[0] else convolved
    # index 0 and those past the overlap find a row of zeros
    rows = F.pad(overlap, (0, 0, 1, 1))
    return convolved + rows[reach.clamp(0, last + 1)]


def _has_no_values(starts: Tensor) -> bool:
    """Is this a shape alone, of which somebody wants to know what it would cost?"""
    return starts.is_meta or (isinstance(starts, FakeTensor) and not torch.compiler.is_compiling())


class Contexts(NamedTuple):
    """Queries in a row that see from the same position on: for each, where it stands."""

    batch: Tensor  # [C]
    start: Tensor  # [C]: the first position seen
    first: Tensor  # [C]: the first query
    last: Tensor  # [C]: the last one

    def of_similar_length(self) -> "Iterator[Contexts]":
        """In groups, so that rows padded to the longest of a group are at most twice as long as they need be."""
        size = (self.last - self.start + 1).float().log2().ceil()
        for each in size.unique():
            yield Contexts(*(field[size == each] for field in self))


def contexts_of(starts: Tensor, past: int) -> Contexts:
    """From ``starts`` ``[B, T]`` of the positions behind ``past``; positions that see nothing are in no context."""
    begins = F.pad(starts.diff(dim=1) != 0, (1, 0), value=True)
    ends = F.pad(begins[:, 1:], (0, 1), value=True)
    rows, first = begins.nonzero(as_tuple=True)
    last = ends.nonzero()[:, 1]
    found = Contexts(rows, starts[rows, first], first + past, last + past)
    # Where padding ends, its last positions and the first context begin at the same place.
    found = found._replace(first=torch.maximum(found.first, found.start))
    seen = found.last >= found.start
    return Contexts(*(field[seen] for field in found))


def attend_with_registers(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix1: Mix | None,
    mix2: Mix | None,
    register_keys: Callable[[Tensor], Tensor],
    register_values: Tensor,
    starts: Tensor | None,
    own_positions: Tensor,
) -> Tensor:
    """The operator over registers and tokens; its arguments are those of the tokens alone.

    Documents are unpacked into rows of their own, which costs memory as they do; so is every position of a window, which costs
    as much as all windows together.

    Args:
        register_keys: of the position of each context's first register, ``[C] -> [C, k, G, Dk]``: they may be turned.
        register_values: ``[k, H, Dv]``
        own_positions: ``[B or 1, T]``, of the queries in their documents, registers included.
    """
    batch, new, total, count = q.shape[0], q.shape[1], k.shape[1], register_values.shape[0]
    past = total - new
    contexts = None if starts is None or _has_no_values(starts) else contexts_of(starts, past)
    if contexts is None or len(contexts.batch) == 0:
        keys = torch.cat([register_keys(own_positions.new_zeros(1)).expand(batch, -1, -1, -1), k], dim=1)
        values = torch.cat([register_values.expand(batch, -1, -1, -1), v], dim=1)
        return operator(q, keys, values, mix1, mix2, None if starts is None else starts + count)
    out = v.new_zeros(batch, new, *v.shape[2:])
    own_positions = own_positions.expand(batch, -1)
    for group in contexts.of_similar_length():
        rows, lengths = group.batch[:, None], group.last - group.start + 1
        longest, queries = int(lengths.max()), int((group.last - group.first).max()) + 1
        # Every context becomes a row of its own, padded on the left, the registers just before its start.
        positions = group.last[:, None] + torch.arange(1 - longest - count, 1, device=k.device)
        is_register = (positions < group.start[:, None]) & (positions >= group.start[:, None] - count)
        own_start = own_positions[group.batch, group.first - past] - (group.first - group.start)
        keys, values = (each[rows, positions.clamp(min=0)] for each in (k, v))
        keys[is_register] = register_keys(own_start - count).flatten(0, 1).to(keys.dtype)
        values[is_register] = register_values.repeat(len(lengths), 1, 1).to(values.dtype)
        asking = group.last[:, None] + torch.arange(1 - queries, 1, device=k.device)
        asked = (asking - past).clamp(min=0)
        mixes = [None if mix is None else mix._replace(gate=mix.gate[rows, asked]) for mix in (mix1, mix2)]
        row_ends = torch.arange(longest + count - queries, longest + count, device=k.device) + 1
        row_starts = torch.minimum((longest - lengths)[:, None], row_ends)
        found = operator(q[rows, asked], keys, values, mixes[0], mixes[1], row_starts)
        meant = asking >= group.first[:, None]
        out[rows.expand_as(asked)[meant], asked[meant]] = found[meant]
    return out
