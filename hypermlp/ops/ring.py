"""Attention over a ring: keys and values in buffers of fixed size, for decoding with fixed shapes.

A ring has N rows; position j is held in row ``j mod N``, so that new positions overwrite the oldest ones. The
number of positions so far is a tensor on the device, and nothing here reads it on the host: a step can be
captured in a CUDA graph, and a compiled step serves every position.

For the query at position p, row i holds position ``p - (p - i) mod N``. That is below 0 for rows that are not
filled yet, and below the query's start for rows that belong to later queries of the same call, so one
comparison with the start hides both.

Shapes: B batch, Tq queries, N rows of the ring.
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.ops import reference
from hypermlp.ops.arguments import Attention, Mix, schema
from hypermlp.ops.layout import SlotMaps, checked_row_starts, raise_where
from hypermlp.ops.library import call, define

MAX_CELLS = 1 << 24  # scores that are held at once


def ring_maps(
    layout: str, starts: Tensor | None, positions: Tensor, rows: int, *, device: torch.device
) -> SlotMaps:
    """Return which rows of a ring each query sees, and in which slots.

    Args:
        starts: int64 ``[B, Tq]``, the first visible position of each query; None for 0.
        positions: int64 ``[Tq]``.
    """
    position = positions[None, :, None]
    index = torch.arange(rows, device=device)[None, None, :]
    start = torch.zeros_like(position) if starts is None else starts[:, :, None]
    lag = (position - index).remainder(rows)
    if layout == "lag":
        key_of_slot = slot_of_key = lag  # row i is in slot (p - i) mod N, slot i in row (p - i) mod N
    else:
        key_of_slot = (start + index).remainder(rows)
        slot_of_key = (position - lag - start).clamp(0, rows - 1)
    return SlotMaps(position - lag >= start, key_of_slot, slot_of_key)


def attention(arguments: Attention, positions: Tensor) -> Tensor:
    """Compute the operator for queries at ``positions``, int64 ``[Tq]``, in plain PyTorch with fixed shapes.

    ``arguments.k`` and ``arguments.v`` are rings. Their unfilled rows must be finite.
    """
    batch, queries, branches = arguments.q.shape[:3]
    rows = arguments.k.shape[1]
    mix1, mix2 = (mix and _first_slots(mix, rows) for mix in (arguments.mix1, arguments.mix2))
    arguments = arguments._replace(mix1=mix1, mix2=mix2)
    size = max(1, MAX_CELLS // (batch * branches * rows))
    if queries <= size:
        return _attend_rows(arguments, positions, slice(None))
    blocks = (slice(first, first + size) for first in range(0, queries, size))
    return torch.cat([_attend_rows(arguments, positions, block) for block in blocks], dim=1)


def _first_slots(mix: Mix, slots: int) -> Mix:
    if slots > mix.diag.shape[1]:
        return reference.with_slots(mix, slots)
    return mix._replace(diag=mix.diag[:, :slots], left=mix.left[:, :slots], right=mix.right[:, :slots])


def _attend_rows(arguments: Attention, positions: Tensor, queries: slice) -> Tensor:
    q, k, starts = arguments.q[:, queries], arguments.k, arguments.starts
    starts = None if starts is None else starts[:, queries]
    mix1, mix2 = (mix and mix._replace(gate=mix.gate[:, queries]) for mix in (arguments.mix1, arguments.mix2))
    maps = ring_maps(arguments.layout, starts, positions[queries], k.shape[1], device=k.device)
    return reference.attention(arguments._replace(q=q, mix1=mix1, mix2=mix2, starts=starts), maps)


def _triton_ring(*given: Any) -> Tensor:
    from hypermlp.ops.triton.decode import decode

    *flat, positions = given
    arguments = Attention.unflatten(tuple(flat))
    batch, queries = arguments.q.shape[:2]
    if queries > 1:  # a chunk of a prompt
        return attention(arguments, positions)
    return decode(arguments, positions.expand(batch))[0]


def _fake_ring(*given: Any) -> Tensor:
    q, v = given[0], given[2]
    return q.new_empty(*q.shape[:2], *v.shape[2:])


_triton_ring_op = define("triton_ring", f"({schema(Attention)}, Tensor positions) -> Tensor", _fake_ring)
torch.library.impl("hypermlp::triton_ring", "default", _triton_ring)


def triton_attention(arguments: Attention, positions: Tensor) -> Tensor:
    """Compute the operator like ``attention``; one query per sequence takes the kernels of "triton"."""
    out: Tensor = call(_triton_ring_op, *arguments.flatten(), positions)
    return out


# The following are operators, so that values are checked when a graph runs, under torch.compile too.


@torch.library.custom_op("hypermlp::ring_positions", mutates_args=())
def ring_positions(past: Tensor, new: int, limit: int, advice: str) -> Tensor:
    """Return the positions ``past`` ... ``past + new - 1``, int64 ``[new]``; raise if they reach ``limit``.

    Args:
        past: int64 ``[]``, the number of positions so far.
        limit: any number of positions if negative.
        advice: what the message tells the user to do.
    """
    positions = past.view(1).clone() if new == 1 else past + torch.arange(new, device=past.device)
    if limit >= 0:
        raise_where(positions >= limit, "too many positions", f"positions below {limit}; {advice}", positions)
    return positions


@ring_positions.register_fake
def _(past: Tensor, new: int, limit: int, advice: str) -> Tensor:
    return past.new_empty(new)


@torch.library.custom_op("hypermlp::ring_starts", mutates_args=())
def ring_starts(starts: Tensor, positions: Tensor, max_slots: int, rows: int) -> Tensor:
    """Return the first visible position of every query, int64 ``[B, Tq]``; raise on impossible values.

    Args:
        starts: ``[B]`` or ``[B, Tq]``.
        positions: int64 ``[Tq]``.
        max_slots: the most positions that a query may see; any number if negative.
        rows: N. The last query's key must not overwrite one that the first query sees.
    """
    found = checked_row_starts(starts, positions, max_slots)
    raise_where(
        positions[-1] - found[:, 0] >= rows,
        f"starts lets these queries see more than the {rows} positions that the state holds",
        "later starts, fewer positions in one call, or new_state(..., capacity=n) with a larger n",
        found[:, 0],
    )
    return found


@ring_starts.register_fake
def _(starts: Tensor, positions: Tensor, max_slots: int, rows: int) -> Tensor:
    return positions.new_empty(starts.shape[0], positions.shape[0])
