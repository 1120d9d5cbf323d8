"""Which positions a position sees: left padding, packed documents, sliding windows.

A ``Visibility`` describes the new positions of one call. It is made once per call of a layer, or once per
call of a model for all its layers, from ``starts``.

Shapes: B batch, T new positions, P positions before them.
"""

from typing import Any

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops.layout import raise_where, row_starts, visible_keys
from hypermlp.ops.ring import ring_positions, ring_starts

ANY_NUMBER = 1 << 62  # of rows of a ring


class Visibility:
    """What the new positions of a call see.

    Attributes:
        past: P, the number of positions before the new ones; an int64 tensor ``[]`` if the keys are in a
            ring (see ``hypermlp.ops.ring``).
        new: T.
        starts: the first visible position as the caller gave it, int64 ``[B]`` or ``[B, T]``; None if every
            position sees all positions up to its own. The attributes below are None then too.
        first_visible: int64 ``[B, T]``, ``starts`` of every new position, checked and at most position + 1.
        reach: int64 ``[B, T]``, how many positions each new position sees, itself included; 0 for padding.
    """

    window: int | None = None
    """The most positions that a position sees; None for any number."""

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
        self.first_visible: Tensor | None = None
        self.reach: Tensor | None = None
        self._past_origins = origins
        self._positions: Tensor | None = None
        self._stream: Tensor | None = None
        self._windowed: dict[tuple[int, int | None], Visibility] = {}
        limits = [limit for limit in (max_visible, capacity) if limit is not None]
        if starts is None:
            self._check_room(min(limits, default=-1), capacity)
            return
        self.starts = starts.long()
        padding_goes_on = streaming and starts.dim() == 1
        known = self.starts.clamp(max=past + new) if padding_goes_on else self.starts
        most = -1 if max_visible is None else max_visible
        if isinstance(past, Tensor):
            self._stream = ring_positions(past, new, -1, "")
            held = ANY_NUMBER if capacity is None else capacity
            self.first_visible = ring_starts(known, self._stream, most, held)
        else:
            self.first_visible = row_starts(known, new, past + new, most)
        self.reach = self.stream() + 1 - self.first_visible

    def _check_room(self, limit: int, capacity: int | None) -> None:
        """Raise if the positions, all of which see the first one, exceed what the state or layer holds."""
        if limit < 0:
            return
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

    def windowed(self, window: int, *, batch: int, ring_rows: int | None = None) -> "Visibility":
        """Return the same positions seen through a window; ``WindowedVisibility`` has the arguments."""
        # A compiled function serves all lengths, so it must not depend on them.
        known = not self.in_ring and not torch.compiler.is_compiling()
        if known and self.known_past + self.new <= window:
            return self
        key = window, ring_rows
        if key not in self._windowed:
            self._windowed[key] = WindowedVisibility(self, window, batch=batch, ring_rows=ring_rows)
        return self._windowed[key]

    def starts_from(self, first: int) -> Tensor | None:
        """Return ``first_visible``, counted from ``first``, the first position whose key an operator gets."""
        assert first == 0
        return self.first_visible

    def operands(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the keys and values ``[B, n, ...]`` that some new position may see, and ``starts`` among
        them.

        ``k`` and ``v`` have the rows of a state, the new ones last.
        """
        return k, v, self.first_visible

    def mask(self) -> Tensor:
        """Return which of the P + T positions each new position sees, bool ``[B or 1, 1, T, P + T]``."""
        return visible_keys(self.first_visible, self.new, self.known_past + self.new, self.device)[:, None]

    def hide_padding(self, x: Tensor) -> Tensor:
        """Zero the rows of ``x`` ``[B, T, D]`` at positions that see nothing, even where they hold NaN."""
        return x if self.reach is None else x.masked_fill((self.reach < 1)[:, :, None], 0)

    def origins(self) -> Tensor | None:
        """Return where each new position's document begins, int64 ``[B, T]``; None if all begin at 0.

        A document begins at the last position that saw only itself.
        """
        if self.first_visible is None:
            return None if self._past_origins is None else self._past_origins[:, None].expand(-1, self.new)
        return document_origins(self.first_visible, self.stream(), self._past_origins)

    def positions(self) -> Tensor:
        """Return the position of each new position within its document, int64 ``[B or 1, T]``.

        A gate on rotated queries makes scores depend on more than distances, so neither padding nor packing
        may shift the positions that RoPE uses.
        """
        if self._positions is None:
            origins = self.origins()
            self._positions = self.stream()[None] if origins is None else self.stream() - origins
        return self._positions


class WindowedVisibility(Visibility):
    """What the new positions see through a sliding window: at most the last ``window`` positions.

    Documents and positions within them are those without the window.
    """

    def __init__(self, base: Visibility, window: int, *, batch: int, ring_rows: int | None):
        """
        Args:
            base: what the positions see without the window.
            batch: B.
            ring_rows: rows of the ring that holds the keys; None if they are not in a ring.
        """
        super().__init__(None, past=base.past, new=base.new, device=base.device)
        self.base, self.window, self.reach_back, self.starts = base, window, window - 1, base.starts
        self._stream = stream = base.stream()
        first = (stream - self.reach_back).clamp(min=0).expand(batch, -1)
        rows = first.contiguous() if base.first_visible is None else torch.maximum(base.first_visible, first)
        if self.in_ring and ring_rows is not None and ring_rows < window + self.new - 1:
            rows = ring_starts(rows, stream, -1, ring_rows)  # later keys may overwrite earlier ones
        self.first_visible, self.reach = rows, stream + 1 - rows
        self._relative: dict[int, Tensor] = {0: rows}

    def hide_padding(self, x: Tensor) -> Tensor:
        return self.base.hide_padding(x)

    def origins(self) -> Tensor | None:
        return self.base.origins()

    def positions(self) -> Tensor:
        return self.base.positions()

    def starts_from(self, first: int) -> Tensor:
        if first not in self._relative:
            assert self.first_visible is not None
            self._relative[first] = self.first_visible - first
        return self._relative[first]

    def operands(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.in_ring:
            return k, v, self.first_visible
        back = min(self.known_past, self.reach_back)
        count = back + self.new
        k, v = (x.narrow(1, x.shape[1] - count, count) for x in (k, v))
        sees_all = self.new == 1 and self.base.first_visible is None
        return k, v, None if sees_all else self.starts_from(self.known_past - back)


def visibility_after(
    state: Any,
    starts: Tensor | None,
    *,
    new: int,
    device: torch.device,
    max_visible: int | None,
) -> Visibility:
    """Return what ``new`` positions see after those that the state holds. ``Visibility`` has the arguments.

    Without ``starts``, those of the last position in the state, a ``DecodingState`` or None, are used again.
    """
    if state is None:
        return Visibility(starts, past=0, new=new, device=device, max_visible=max_visible)
    return Visibility(
        state.following_starts() if starts is None else starts,
        past=state.past,
        new=new,
        device=device,
        max_visible=max_visible,
        origins=state.origins,
        streaming=True,
        capacity=state.limit,
    )


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

    A window moves with every position, so that the next ones do not follow from the last.
    """
    raise_where(
        (last > before) & (last < length - 1),
        "starts moved with the last position, as a sliding window does, and none are given for the new "
        "positions",
        "starts of shape [B, T] with every call",
        last,
    )
