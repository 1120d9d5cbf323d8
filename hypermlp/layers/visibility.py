"""Which positions a position sees: left padding, packed documents, sliding windows.

A ``Visibility`` describes the new positions of one call. It is made once per call of a layer, or once per
call of a model for all its layers, from ``starts``.

Shapes: B batch, T new positions, P positions before them.
"""

import torch
from torch import Tensor

from hypermlp.ops.layout import raise_where, row_starts, visible_keys


class Visibility:
    """What the new positions of a call see.

    Attributes:
        past: P, the number of positions before the new ones.
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
        past: int,
        new: int,
        device: torch.device,
        max_visible: int | None = None,
        origins: Tensor | None = None,
        streaming: bool = False,
    ):
        """
        Args:
            starts: integers, ``[B]`` or ``[B, T]``.
            max_visible: the most positions that one position may see; more are an error. None for any number.
            origins: int64 ``[B]``, where the document of the last past position begins; None for 0.
            streaming: whether later calls may go on, so that padding given as ``[B]`` may exceed this call.
        """
        self.past, self.new, self.device = past, new, device
        self.starts: Tensor | None = None
        self.rows: Tensor | None = None
        self.reach: Tensor | None = None
        self._past_origins = origins
        self._positions: Tensor | None = None
        if starts is not None:
            self.starts = starts.long()
            padding_goes_on = streaming and starts.dim() == 1
            known = self.starts.clamp(max=past + new) if padding_goes_on else self.starts
            self.rows = row_starts(known, new, past + new, -1 if max_visible is None else max_visible)
            self.reach = self.stream() + 1 - self.rows

    def stream(self) -> Tensor:
        """Return the new positions, counted from the beginning of the stream, ``[T]``."""
        return torch.arange(self.past, self.past + self.new, device=self.device)

    def mask(self) -> Tensor:
        """Return which of the P + T positions each new position sees, bool ``[B or 1, 1, T, P + T]``."""
        return visible_keys(self.rows, self.new, self.past + self.new, self.device)[:, None]

    def hide_padding(self, x: Tensor) -> Tensor:
        """Zero the rows of ``x`` ``[B, T, D]`` at positions that see nothing, even where they hold NaN."""
        return x if self.reach is None else x.masked_fill((self.reach < 1)[:, :, None], 0)

    def origins(self) -> Tensor | None:
        """Return where each new position's document begins, int64 ``[B, T]``; None if all begin at 0.

        A document begins at the last position that saw only itself.
        """
        if self.rows is None:
            return None if self._past_origins is None else self._past_origins[:, None].expand(-1, self.new)
        return document_origins(self.rows, self.past, self._past_origins)

    def positions(self) -> Tensor:
        """Return the position of each new position within its document, int64 ``[B or 1, T]``.

        A gate on rotated queries makes scores depend on more than distances, so neither padding nor packing
        may shift the positions that RoPE uses.
        """
        if self._positions is None:
            origins = self.origins()
            self._positions = self.stream()[None] if origins is None else self.stream() - origins
        return self._positions


def document_origins(starts: Tensor, first: int = 0, before: Tensor | None = None) -> Tensor:
    """Return where the document of each position begins, int64 ``[B, T]``.

    Args:
        starts: ``[B, T]``, the first visible position of the positions from ``first`` on.
        before: ``[B]``, where the document of position ``first - 1`` begins; None for 0.
    """
    stream = torch.arange(first, first + starts.shape[1], device=starts.device)
    begins = torch.where(starts == stream, stream, 0 if before is None else before[:, None])
    return begins.cummax(dim=1).values


def following_starts(starts: Tensor, length: int) -> Tensor:
    """Return ``starts`` ``[B]`` for positions after the last of ``length`` ones: the same padding or
    document.

    ``starts``: ``[B, at least the last two]`` of the positions so far. A window moves with every position and
    cannot be continued without being told.
    """
    last = starts[:, -1]
    moved = last > starts[:, -2] if starts.shape[1] > 1 else torch.zeros_like(last, dtype=torch.bool)
    raise_where(
        moved & (last < length - 1),
        "starts moved with the last position, as a sliding window does, and none are given for the new "
        "positions",
        "starts of shape [B, T] with every call",
        last,
    )
    return last
