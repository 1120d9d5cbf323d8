"""Which positions a position sees: left padding, packed documents, sliding windows.

A ``Visibility`` describes the new positions of one call. It is made once per call of a layer, or once per
call of a model for all its layers, from ``starts``.

Shapes: B batch, T new positions, P positions before them.
"""

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops.layout import raise_where, row_starts, visible_keys
from hypermlp.ops.ring import ring_positions, ring_starts


class Visibility:
    """What the new positions of a call see.

    Attributes:
        past: P, the number of positions before the new ones; an int64 tensor ``[]`` if the keys are in a
            ring (see ``hypermlp.ops.ring``).
        new: T.
        starts: the first visible position as the caller gave it, int64 ``[B]`` or ``[B, T]``; None if every
            position sees all positions up to its own. The attributes below are None then too.
        rows: int64 ``[B, T]``, ``starts`` of every new position, checked and at most position + 1.
        reach: int64 ``[B, T]``, how many positions each new position sees, itself included; 0 for padding.
    """

    def __init__(
        self,
        starts: Tensor | None,
        *,
        past: int | Tensor,
        new: int,
        device: torch.device,
        max_visible: int | None = None,
        origins: Tensor | None = None,
        streaming: bool = False,
        capacity: int | None = None,
    ):
        """
        Args:
            starts: integers, ``[B]`` or ``[B, T]``.
            max_visible: the most positions that one position may see; more are an error. None for any number.
            origins: int64 ``[B]``, where the document of the last past position begins; None for 0.
            streaming: whether later calls may go on, so that padding given as ``[B]`` may exceed this call.
            capacity: the most positions that the state holds; None for any number.
        """
        self.past, self.new, self.device = past, new, device
        self.starts: Tensor | None = None
        self.rows: Tensor | None = None
        self.reach: Tensor | None = None
        self._past_origins = origins
        self._positions: Tensor | None = None
        self._stream: Tensor | None = None
        limits = [limit for limit in (max_visible, capacity) if limit is not None]
        if starts is None:
            self._check_room(min(limits, default=-1), capacity)
            return
        self.starts = starts.long()
        padding_goes_on = streaming and starts.dim() == 1
        known = self.starts.clamp(max=past + new) if padding_goes_on else self.starts
        most = -1 if max_visible is None else max_visible
        if isinstance(past, Tensor):
            assert capacity is not None
            self._stream = ring_positions(past, new, -1, "")
            self.rows = ring_starts(known, self._stream, most, capacity)
        else:
            self.rows = row_starts(known, new, past + new, most)
        self.reach = self.stream() + 1 - self.rows

    def _check_room(self, limit: int, capacity: int | None) -> None:
        """Raise if the positions, all of which see the first one, exceed what the state or layer holds."""
        advice = f"the state holds {capacity} positions: make one with new_state(..., capacity=n), a larger n"
        if isinstance(self.past, Tensor):
            if limit != capacity:
                advice = f"max_length is {limit}: build the layer with a larger one"
            self._stream = ring_positions(self.past, self.new, limit, f"{advice}, or pass starts")
        elif capacity is not None and self.past + self.new > capacity:
            raise UserError(f"{self.past + self.new} positions; {advice}, or pass starts (a sliding window)")

    @property
    def known_past(self) -> int:
        """P, for layers whose keys are never in a ring."""
        assert not isinstance(self.past, Tensor)
        return self.past

    @property
    def in_ring(self) -> bool:
        """Whether the keys are in a ring: the positions are known on the device only."""
        return isinstance(self.past, Tensor)

    def stream(self) -> Tensor:
        """Return the new positions, counted from the beginning of the stream, ``[T]``."""
        if self._stream is None:
            self._stream = self.past + torch.arange(self.new, device=self.device)
        return self._stream

    def mask(self) -> Tensor:
        """Return which of the P + T positions each new position sees, bool ``[B or 1, 1, T, P + T]``."""
        return visible_keys(self.rows, self.new, self.known_past + self.new, self.device)[:, None]

    def hide_padding(self, x: Tensor) -> Tensor:
        """Zero the rows of ``x`` ``[B, T, D]`` at positions that see nothing, even where they hold NaN."""
        return x if self.reach is None else x.masked_fill((self.reach < 1)[:, :, None], 0)

    def origins(self) -> Tensor | None:
        """Return where each new position's document begins, int64 ``[B, T]``; None if all begin at 0.

        A document begins at the last position that saw only itself.
        """
        if self.rows is None:
            return None if self._past_origins is None else self._past_origins[:, None].expand(-1, self.new)
        return document_origins(self.rows, self.stream(), self._past_origins)

    def positions(self) -> Tensor:
        """Return the position of each new position within its document, int64 ``[B or 1, T]``.

        A gate on rotated queries makes scores depend on more than distances, so neither padding nor packing
        may shift the positions that RoPE uses.
        """
        if self._positions is None:
            origins = self.origins()
            self._positions = self.stream()[None] if origins is None else self.stream() - origins
        return self._positions


def document_origins(starts: Tensor, positions: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """Return where the document of each position begins, int64 ``[B, T]``.

    Args:
        starts: ``[B, T]``, the first visible position of each position.
        positions: ``[T]``, one after another; None if they begin at 0.
        before: ``[B]``, where the document of the position before these begins; None for 0.
    """
    stream = torch.arange(starts.shape[1], device=starts.device) if positions is None else positions
    begins = torch.where(starts == stream, stream, 0 if before is None else before[:, None])
    return begins.cummax(dim=1).values


def following_starts(starts: Tensor, length: int) -> Tensor:
    """Return ``starts`` ``[B]`` for positions after the last of ``length`` ones: the same padding or
    document.

    ``starts``: ``[B, at least the last two]`` of the positions so far.
    """
    last = starts[:, -1]
    if starts.shape[1] > 1:
        refuse_moving_starts(starts[:, -2], last, length)
    return last


def refuse_moving_starts(before: Tensor, last: Tensor, length: int | Tensor) -> None:
    """Raise if ``starts`` of the last two of ``length`` positions, ``[B]`` each, are those of a window.

    A window moves with every position and cannot be continued without being told.
    """
    raise_where(
        (last > before) & (last < length - 1),
        "starts moved with the last position, as a sliding window does, and none are given for the new "
        "positions",
        "starts of shape [B, T] with every call",
        last,
    )
