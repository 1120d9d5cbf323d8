"""A block of score rows in one buffer, which two views read in the order of keys and in the order of slots.

A block holds M consecutive queries against the n keys that any of them may see. In layout "lag" each batch
item owns M * (n + 1) cells: M of padding, then M rows of n scores. The same memory, read as M rows of n + 1
cells without the first cell of each, is the block aligned by lag, newest last. M = 3 queries, the last 3 of n
= 5 positions (2:4 is the score of query 2 with key 4, dots are padding):

    ordinary: row stride n = 5             aligned: row stride n + 1 = 6, first cell dropped
              .   .   .                    [.]    .   .   2:0 2:1 2:2
    2:0 2:1 2:2 2:3 2:4                    [2:3]  2:4 3:0 3:1 3:2 3:3
    3:0 3:1 3:2 3:3 3:4                    [3:4]  4:0 4:1 4:2 4:3 4:4
    4:0 4:1 4:2 4:3 4:4                     lag:  4   3   2   1   0

The last column is lag 0 in every row. Cells left of key 0 are padding, or the future of the row above, which
is masked: aligned rows are zero there too. Both views have unit column stride and rows that do not overlap,
so a GEMM reads and writes them in place, and nothing is flipped, gathered or copied. In layout "forward" both
views are the same if every query starts at key 0; only "forward" with ``starts`` gathers.

Shapes: H heads (branches), B batch, M queries, n keys.
"""

import torch
from torch import Tensor


class ScoreBlock:
    """The geometry of one block: the shape of its buffers, their views and their mask."""

    def __init__(
        self,
        queries: range,
        *,
        offset: int,
        batch: int,
        layout: str,
        starts: Tensor | None,
        first_key: int,
        device: torch.device,
    ):
        self.queries = slice(queries.start, queries.stop)
        self.keys = slice(first_key, offset + queries.stop)  # query i is at position offset + i
        self.batch, self.rows, self.columns = batch, len(queries), offset + queries.stop - first_key
        self.skewed = layout == "lag"
        self.row_stride = self.columns + 1 if self.skewed else self.columns
        self._hidden: Tensor | None = None  # bool [B, cells], only with starts
        self._key_of_slot: Tensor | None = None  # int [B, M, n], only with starts in layout "forward"
        row, column = (
            torch.arange(self.rows, device=device)[:, None],
            torch.arange(self.columns, device=device),
        )
        if starts is None:
            # The cells to mask without starts, all within M columns: left of key 0 (aligned), after the query
            # (ordinary).
            self._corner = (
                column[: self.rows - 1] < self.rows - 1 - row if self.skewed else column[: self.rows] > row
            )
            return
        position, start = (
            row + (self.columns - self.rows),
            starts[:, self.queries, None] - first_key,
        )  # as columns
        hidden = (column > position) | (column < start)  # [B, M, n]
        padding = hidden.new_ones(batch, self.rows if self.skewed else 0)
        self._hidden = torch.cat([padding, hidden.flatten(1)], dim=1)
        if not self.skewed:
            self._key_of_slot = (column + start).clamp(0, self.columns - 1)
            self._slot_of_key = (column - start).clamp(0, self.columns - 1)
            self._missing_slot = column > position - start

    def buffer_shape(self, heads: int) -> tuple[int, int, int]:
        """Return ``[H, B, cells]``."""
        return heads, self.batch, self.rows * self.row_stride

    def ordinary(self, buffer: Tensor) -> Tensor:
        """Return the view ``[H * B, M, n]`` in which column j is key ``keys.start + j``."""
        padding = self.rows if self.skewed else 0
        return buffer.flatten(0, 1)[:, padding:].unflatten(1, (self.rows, self.columns))

    def aligned(self, buffer: Tensor) -> Tensor:
        """Return ``[H, B * M, n]``, one column per slot (newest last if skewed); a view where possible."""
        if self._key_of_slot is not None:
            return self._gather(buffer, self._key_of_slot).masked_fill_(self._missing_slot, 0).flatten(1, 2)
        return buffer.view(buffer.shape[0], self.batch * self.rows, self.row_stride)[
            :, :, self.row_stride - self.columns :
        ]

    def store_aligned(self, buffer: Tensor, values: Tensor) -> None:
        """Store values that ``aligned`` returned and the caller changed; does nothing for a view."""
        if self._key_of_slot is not None:
            buffer.copy_(self._gather(values, self._slot_of_key).flatten(2))

    def mask_(self, buffer: Tensor, value: float = 0.0, *, aligned_write: bool = False) -> Tensor:
        """Fill every cell that is no visible key.

        ``aligned_write``: the last write was through the aligned view, which does not change dropped cells.
        """
        if self._hidden is not None:
            return buffer.masked_fill_(self._hidden, value)
        rows = buffer.view(buffer.shape[0], self.batch, self.rows, self.row_stride)
        if not self.skewed:
            rows[..., self.columns - self.rows :].masked_fill_(self._corner, value)
        else:
            rows[..., 1 : self.rows].masked_fill_(self._corner, value)
            if not aligned_write:
                rows[..., 0].fill_(value)
        return buffer

    def _gather(self, values: Tensor, index: Tensor) -> Tensor:
        shape = (values.shape[0], self.batch, self.rows, self.columns)
        return values.reshape(shape).gather(-1, index.expand(shape))
