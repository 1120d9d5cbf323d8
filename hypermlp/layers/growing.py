"""Tensors that grow by a row per position, and may forget their oldest rows.

Shapes: B batch, T positions so far.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class GrowingRows:
    """A tensor with one row per position along dim 1, which grows and may forget its oldest rows.

    The rows lie in a buffer that doubles and is written in place, wherever no gradient has to flow.
    """

    def __init__(self, rows: Tensor | None = None, forgotten: int = 0):
        self.buffer = rows
        self.forgotten = forgotten
        """Positions whose rows were dropped."""
        self.length = forgotten + (0 if rows is None else rows.shape[1])
        """Positions in all; later rows of the buffer do not count yet."""
        self.kept: int | None = None
        """How many of the latest rows are kept; None for all."""

    @property
    def held(self) -> int:
        return self.length - self.forgotten

    def get(self) -> Tensor | None:
        return None if self.buffer is None else self.buffer[:, : self.held]

    def extended(self, new: Tensor) -> Tensor:
        """Return the rows followed by ``new``, which count only when ``length`` is raised."""
        count = new.shape[1]
        if torch.is_grad_enabled():
            past = self.get()
            # A new buffer each time: the old one may be saved for a backward, and new may be the caller's own
            # tensor.
            self.buffer = torch.cat([new[:, :0] if past is None else past, new], dim=1)
            return self.buffer
        buffer = self.room(count, new, new.shape[2:])
        buffer.narrow(1, self.held, count).copy_(new)
        return buffer.narrow(1, 0, self.held + count)

    def room(self, count: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer of rows of this shape with room for ``count`` more, to write in place."""
        buffer, total = self.buffer, self.held + count
        if buffer is None or _frozen(buffer) or buffer.shape[1] < total:
            rows = max(64, 2 * total)
            if self.kept is not None:  # no more than there are before older rows are dropped
                rows = max(total, min(rows, most_rows(self.kept) + count + 1))
            self.buffer = like.new_empty(like.shape[0], rows, *shape)
            if buffer is not None:
                self.buffer[:, : self.held] = buffer[:, : self.held]
            return self.buffer
        return buffer

    def drop_oldest(self) -> None:
        """Drop older rows once there are half as many again as are kept: amortised constant time each.

        The rows move to the front of a buffer that ``room`` made, and that nobody else uses.
        """
        count = self.kept
        if self.buffer is None or count is None or self.held <= most_rows(count):
            return
        kept = self.buffer[:, self.held - count : self.held].clone()
        if torch.is_grad_enabled() or _frozen(self.buffer) or self.buffer.shape[1] == self.held:
            self.buffer = kept
        else:
            self.buffer[:, :count] = kept
        self.forgotten = self.length - count

    def changed(self, change: Callable[[Tensor], Tensor]) -> "GrowingRows":
        rows = self.get()
        other = GrowingRows() if rows is None else GrowingRows(change(rows), self.forgotten)
        other.kept = self.kept
        return other


def most_rows(kept: int) -> int:
    """Return how many rows there may be before all but the last ``kept`` are dropped."""
    return kept + max(64, kept // 2)


def _frozen(buffer: Tensor) -> bool:
    """Return True if in-place writes are forbidden.

    That is so if it requires grad, or is an inference tensor outside inference mode.
    """
    return buffer.requires_grad or only_for_inference(buffer)


def only_for_inference(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()
