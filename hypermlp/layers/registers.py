"""Registers: learned rows that are prepended to every context, as if they were its oldest tokens.

By definition a layer with k registers is the layer without them, on an input that begins with those rows::

    layer(x) = plain_layer(cat([registers, x]))[k:]

and so for every context that ``starts`` makes: padded, packed or seen through a window, each has the
registers before it.

Shapes: B batch, T new positions, G score branches, H heads, k registers, C contexts.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hypermlp.layers.rotary import Rope, rotate
from hypermlp.ops.api import causal_conv
from hypermlp.ops.arguments import Attention


class ProjectedRegisters(NamedTuple):
    """The registers after a layer's convolution and projections."""

    keys: Tensor  # [k, G, Dk], not rotated
    values: Tensor  # [k, H, Dv]
    overlaps: tuple[Tensor, Tensor] | None
    """What the registers add to the convolved inputs of keys and values at the first positions of a context,
    ``[taps - 1, D]`` each; None without a convolution."""
    rope: Rope | None

    def keys_at(self, first: Tensor) -> Tensor:
        """Return keys ``[C, k, G, Dk]`` of contexts whose first register is at position ``first`` ``[C]``."""
        rows = self.keys.expand(first.shape[0], -1, -1, -1)
        if self.rope is None:
            return rows
        count = torch.arange(self.keys.shape[0], device=first.device)
        return rotate(rows, first[:, None] + count, self.rope)


def conv_of_registers(registers: Tensor, k_conv: Tensor, v_conv: Tensor) -> tuple[Tensor, Tensor]:
    """Return both convolutions of the rows ``[k, D]`` followed by zeros: ``[k + taps - 1, D]`` each.

    The first k rows are the registers' own. The rest is what they add to the first positions of a context,
    since the convolution of a sequence is the sum of the convolutions of its parts.
    """
    rows = F.pad(registers, (0, 0, 0, k_conv.shape[1] - 1))[None]
    keys_from, values_from = causal_conv(rows, (k_conv, v_conv), rows.shape[1], backend="reference")
    return keys_from[0], values_from[0]


def add_overlap(convolved: Tensor, overlap: Tensor, reach: Tensor | None, past: int) -> Tensor:
    """Add ``overlap`` ``[taps - 1, D]`` to ``convolved`` ``[B, T, D]`` where a context begins."""
    length, last = convolved.shape[1], overlap.shape[0]
    if reach is None:
        head = overlap[past : past + length]
        return convolved + F.pad(head, (0, 0, 0, length - head.shape[0])) if head.shape[0] else convolved
    rows = F.pad(overlap, (0, 0, 1, 1))  # index 0 and indices past the overlap select a row of zeros
    return convolved + rows[reach.clamp(0, last + 1)]


def _has_no_values(starts: Tensor) -> bool:
    """Return True for meta and fake tensors, which hold no values."""
    return starts.is_meta or (isinstance(starts, FakeTensor) and not torch.compiler.is_compiling())


class Contexts(NamedTuple):
    """Runs of queries that see from the same position on."""

    batch: Tensor  # [C]
    start: Tensor  # [C], the first visible position
    first: Tensor  # [C], the position of the first query
    last: Tensor  # [C], the position of the last query

    def of_similar_length(self) -> "Iterator[Contexts]":
        """Yield groups in which no context is more than twice as long as another, to bound the padding."""
        size = (self.last - self.start + 1).float().log2().ceil()
        for group in size.unique():
            yield Contexts(*(field[size == group] for field in self))


def contexts_of(starts: Tensor, past: int) -> Contexts:
    """Split the positions after ``past`` into contexts by ``starts`` ``[B, T]``.

    Positions that see nothing are in none.
    """
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
    operator: Callable[[Attention], Tensor],
    arguments: Attention,
    registers: ProjectedRegisters,
    own_positions: Tensor,
) -> Tensor:
    """Run the operator over registers and tokens; ``arguments`` are those of the tokens alone.

    Documents are unpacked into rows of their own, which costs as much memory as they do. So is every position
    of a sliding window, which costs as much as all windows together.

    Args:
        own_positions: ``[B or 1, T]``, positions of the queries within their documents, registers included.
    """
    q, k, v, mix1, mix2, starts = arguments[:6]
    batch, new, total, count = q.shape[0], q.shape[1], k.shape[1], registers.values.shape[0]
    past = total - new
    contexts = None if starts is None or _has_no_values(starts) else contexts_of(starts, past)
    if contexts is None or len(contexts.batch) == 0:
        # Just before the first key: behind a sliding window, that is not the beginning of the document.
        first = registers.keys_at(own_positions[:, 0] - past - count).expand(batch, -1, -1, -1)
        keys = torch.cat([first, k], dim=1)
        values = torch.cat([registers.values.expand(batch, -1, -1, -1), v], dim=1)
        shifted = None if starts is None else starts + count
        return operator(arguments._replace(k=keys, v=values, starts=shifted))
    out = v.new_zeros(batch, new, *v.shape[2:])
    own_positions = own_positions.expand(batch, -1)
    for group in contexts.of_similar_length():
        rows, lengths = group.batch[:, None], group.last - group.start + 1
        longest, queries = int(lengths.max()), int((group.last - group.first).max()) + 1
        # Every context becomes a row of its own, padded on the left, the registers just before its start.
        positions = group.last[:, None] + torch.arange(1 - longest - count, 1, device=k.device)
        is_register = (positions < group.start[:, None]) & (positions >= group.start[:, None] - count)
        own_start = own_positions[group.batch, group.first - past] - (group.first - group.start)
        keys, values = (x[rows, positions.clamp(min=0)] for x in (k, v))
        keys[is_register] = registers.keys_at(own_start - count).flatten(0, 1).to(keys.dtype)
        values[is_register] = registers.values.repeat(len(lengths), 1, 1).to(values.dtype)
        # The last `queries` positions of each context; shorter contexts have fewer, and padding before them.
        query_positions = group.last[:, None] + torch.arange(1 - queries, 1, device=k.device)
        is_query = query_positions >= group.first[:, None]
        index = (query_positions - past).clamp(min=0)
        mixes = [None if mix is None else mix._replace(gate=mix.gate[rows, index]) for mix in (mix1, mix2)]
        row_ends = torch.arange(longest + count - queries, longest + count, device=k.device) + 1
        row_starts = torch.minimum((longest - lengths)[:, None], row_ends)
        unpacked = arguments._replace(
            q=q[rows, index], k=keys, v=values, mix1=mixes[0], mix2=mixes[1], starts=row_starts
        )
        out[rows.expand_as(index)[is_query], index[is_query]] = operator(unpacked)[is_query]
    return out
