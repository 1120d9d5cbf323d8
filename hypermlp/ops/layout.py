"""Which keys a query sees, and in which slot it sees them.

Query ``i`` of ``Tq`` is at position ``p = Tk - Tq + i`` and sees the keys ``start <= j <= p``. A slot
numbers them:

    layout "lag":      slot = p - j        slot 0 is the query itself, older keys follow
    layout "forward":  slot = j - start    slot 0 is the oldest visible key
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hypermlp.errors import UserError

LAYOUTS = ("lag", "forward")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def query_positions(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.arange(num_keys - num_queries, num_keys, device=device)


def check_starts_form(starts: Tensor, like: Tensor) -> None:
    """Check type, shape and device; ``like`` is ``[B, Tq, ...]``. ``row_starts`` checks the values."""
    if not isinstance(starts, Tensor):
        raise UserError(f"starts is a {type(starts).__name__}; it must be an integer tensor")
    if starts.dtype not in INTEGERS:
        raise UserError(
            f"starts is {starts.dtype}; it must be an integer tensor of first visible positions (for left "
            "padding, the number of padded positions of each sequence: (attention_mask == 0).sum(1))"
        )
    # compared number by number: torch.compile may trace them as symbols
    fits = starts.dim() in (1, 2) and all(a == b for a, b in zip(starts.shape, like.shape, strict=False))
    if not fits:
        raise UserError(
            f"starts has shape {list(starts.shape)}; it must be [{like.shape[0]}] or {list(like.shape[:2])}"
        )
    if starts.device != like.device:
        raise UserError(
            f"starts is on {starts.device}, its queries on {like.device}; they must be on one device"
        )


@torch.library.custom_op("hypermlp::row_starts", mutates_args=())
def row_starts(starts: Tensor, num_queries: int, num_keys: int, max_slots: int) -> Tensor:
    """Return the first visible position of every query, int64 ``[B, Tq]``; raise on impossible values.

    This is an operator, so that the values are checked when the graph runs, under ``torch.compile`` too.

    Args:
        starts: ``[B]`` or ``[B, Tq]``.
        max_slots: the most positions that a query may see; any number if negative.
    """
    return checked_row_starts(starts, query_positions(num_queries, num_keys, starts.device), max_slots)


def checked_row_starts(starts: Tensor, positions: Tensor, max_slots: int) -> Tensor:
    """Return ``row_starts`` of queries at ``positions``, int64 ``[Tq]``; raise on impossible values."""
    limits = (positions[-1] + 1).expand_as(positions) if starts.dim() == 1 else positions + 1
    rows = (starts[:, None] if starts.dim() == 1 else starts).long()
    checks = [
        (rows < 0, "starts must not be negative", "0 <= starts"),
        (
            rows > limits,
            "starts lies beyond its query",
            "starts <= position + 1 (or <= Tk for starts of shape [B])",
        ),
    ]
    if starts.dim() == 2:
        decreases = torch.nn.functional.pad(rows.diff(dim=1) < 0, (1, 0))
        checks.append(
            (decreases, "starts must not decrease along the queries", "starts[:, i] <= starts[:, i + 1]")
        )
    if max_slots >= 0:
        too_long = positions - rows >= max_slots
        checks.append(
            (
                too_long,
                f"starts lets a query see more than {max_slots} positions",
                f"starts > position - {max_slots}",
            )
        )
    for wrong, what, allowed in checks:
        raise_where(wrong, what, allowed, rows)
    return torch.minimum(rows, positions + 1)


@row_starts.register_fake
def _(starts: Tensor, num_queries: int, num_keys: int, max_slots: int) -> Tensor:
    return starts.new_empty(starts.shape[0], num_queries, dtype=torch.int64)


def check_cu_seqlens_form(cu_seqlens: Tensor, like: Tensor) -> None:
    """Check type, shape and device; ``like`` is ``[B, Tq, ...]``. ``packed_starts`` checks the values."""
    if not isinstance(cu_seqlens, Tensor):
        raise UserError(f"cu_seqlens is a {type(cu_seqlens).__name__}; it must be an integer tensor [N + 1]")
    if cu_seqlens.dtype not in INTEGERS:
        raise UserError(f"cu_seqlens is {cu_seqlens.dtype}; it must be an integer tensor [N + 1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise UserError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [N + 1] for N packed sequences: 0, "
            "and where each of them ends"
        )
    if like.shape[0] != 1:
        raise UserError(
            f"cu_seqlens describes one row of packed sequences, but the batch size is {like.shape[0]}; put "
            "all sequences into one row, or pass starts"
        )
    if cu_seqlens.device != like.device:
        raise UserError(
            f"cu_seqlens is on {cu_seqlens.device}, its positions on {like.device}; they must be on one "
            "device"
        )


@torch.library.custom_op("hypermlp::packed_starts", mutates_args=())
def packed_starts(cu_seqlens: Tensor, num_queries: int, num_keys: int, longest: int) -> Tensor:
    """Return ``starts``, int64 ``[1, Tq]``, of sequences packed into one row; raise on impossible values.

    This is an operator, so that the values are checked when the graph runs, under ``torch.compile`` too.

    Args:
        cu_seqlens: ``[N + 1]``, 0 and where each sequence ends.
        longest: what the caller says is the length of the longest sequence; any number if negative.
    """
    ends, lengths = cu_seqlens.long(), cu_seqlens.long().diff()
    raise_where(ends[:1] != 0, "cu_seqlens begins with another number than 0", "cu_seqlens[0] == 0", ends[:1])
    falls = torch.nn.functional.pad(lengths < 0, (1, 0))
    raise_where(falls, "cu_seqlens decreases", "cumulative lengths, which do not decrease", ends)
    raise_where(
        ends[-1:] != num_keys,
        f"cu_seqlens describes another number of positions than the {num_keys} that are given",
        f"cu_seqlens[-1] == {num_keys}",
        ends[-1:],
    )
    if longest >= 0:
        raise_where(
            lengths > longest,
            f"cu_seqlens has a sequence that is longer than max_length_q = {longest}",
            f"lengths up to {longest}, or a larger max_length_q",
            lengths,
        )
    positions = query_positions(num_queries, num_keys, ends.device)
    return ends[torch.searchsorted(ends, positions, right=True) - 1][None]


@packed_starts.register_fake
def _(cu_seqlens: Tensor, num_queries: int, num_keys: int, longest: int) -> Tensor:
    return cu_seqlens.new_empty(1, num_queries, dtype=torch.int64)


def raise_where(wrong: Tensor, what: str, allowed: str, values: Tensor) -> None:
    """Raise with the first of ``values`` at which ``wrong`` holds; its shape may be a broadcast one."""
    if isinstance(wrong, FakeTensor):  # has no contents
        return
    if wrong.device.type != "cpu":
        right = ~wrong if wrong.numel() == 1 else ~wrong.any()
        torch._assert_async(right, f"{what}; allowed: {allowed}")  # no device synchronisation
    elif wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise UserError(
            f"{what}: got {values.expand(wrong.shape)[place].item()} at index {place}; allowed: {allowed}"
        )


def visible_keys(starts: Tensor | None, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return whether each query sees each key, bool ``[B or 1, Tq, Tk]``."""
    position = query_positions(num_queries, num_keys, device)[None, :, None]
    key = torch.arange(num_keys, device=device)[None, None, :]
    visible = key <= position
    return visible if starts is None else visible & (key >= starts[:, :, None])


class SlotMaps(NamedTuple):
    """Which keys a query sees, and the slot of each key and the key of each slot, ``[B or 1, Tq, Tk]``.

    The indices are meaningful for visible keys and existing slots, and within bounds elsewhere.
    """

    visible: Tensor  # bool, by key
    key_of_slot: Tensor
    slot_of_key: Tensor


def slot_maps(
    layout: str, starts: Tensor | None, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return ``key_of_slot`` and ``slot_of_key``, int64 ``[B or 1, Tq, Tk]``.

    They are meaningful for visible keys and existing slots, and clamped elsewhere.
    """
    position = query_positions(num_queries, num_keys, device)[None, :, None]
    index = torch.arange(num_keys, device=device)[None, None, :]
    if layout == "lag":
        key_of_slot = slot_of_key = position - index
    else:
        start = torch.zeros_like(position) if starts is None else starts[:, :, None]
        key_of_slot, slot_of_key = start + index, index - start
    return key_of_slot.clamp(0, num_keys - 1), slot_of_key.clamp(0, num_keys - 1)
