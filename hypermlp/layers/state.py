"""What a mixer remembers while decoding.

Shapes: B batch, T positions so far, H heads, Dk, Dv widths, D layer width.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.ops.layout import raise_where


class Rows:
    """A tensor that grows along dim 1: in a buffer that doubles and is written in place, wherever no gradient has to flow."""

    def __init__(self, rows: Tensor | None = None):
        self.buffer = rows
        self.length = 0 if rows is None else rows.shape[1]

    def get(self) -> Tensor | None:
        return None if self.buffer is None else self.buffer[:, : self.length]

    def extended(self, new: Tensor) -> Tensor:
        """The rows and ``new``. They become part of this only when ``length`` is raised."""
        count = new.shape[1]
        if torch.is_grad_enabled():
            past = self.get()
            # A new buffer each time: the old one may be saved for a backward, and new may be the caller's own tensor.
            self.buffer = torch.cat([new[:, :0] if past is None else past, new], dim=1)
            return self.buffer
        buffer = self.room(count, new, new.shape[2:])
        buffer.narrow(1, self.length, count).copy_(new)
        return buffer.narrow(1, 0, self.length + count)

    def room(self, count: int, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A buffer of the rows, each of ``shape``, that has room for ``count`` more and may be written in place."""
        buffer, total = self.buffer, self.length + count
        if buffer is None or _frozen(buffer) or buffer.shape[1] < total:
            self.buffer = like.new_empty(like.shape[0], max(64, 2 * total), *shape)
            if buffer is not None:
                self.buffer[:, : self.length] = buffer[:, : self.length]
            return self.buffer
        return buffer

    def keep_last(self, count: int) -> None:
        """Forget older rows, now and then: when there are twice as many as needed."""
        if self.buffer is not None and self.length > 2 * count + 64:
            self.buffer = self.buffer[:, self.length - count : self.length].clone()
            self.length = count


def _frozen(buffer: Tensor) -> bool:
    """May it not be written in place? A tensor made in inference mode may not, outside of it."""
    if buffer.requires_grad:
        return True
    return (
        not torch.compiler.is_compiling() and buffer.is_inference() and not torch.is_inference_mode_enabled()
    )


def require_kind(known: Tensor | None, new: Tensor) -> None:
    if known is not None and (known.dtype, known.device) != (new.dtype, new.device):
        raise UserError(
            f"the state holds {known.dtype} on {known.device}, this call makes {new.dtype} on {new.device}; "
            "decode under the same autocast as the prompt, or move the state with state.to(...)"
        )


def starts_to_go_on(starts: Tensor, length: int) -> Tensor:
    """Those of the last of ``length`` positions, ``[B]``, from ``[B, T]``; a window cannot be guessed."""
    last = starts[:, -1]
    moved = last > starts[:, -2] if starts.shape[1] > 1 else torch.zeros_like(last, dtype=torch.bool)
    raise_where(
        moved & (last < length - 1),
        "starts moved along with the last position, as a window does, and none are given for the new ones",
        "starts of shape [B, T] with every call",
        last,
    )
    return last


def check_index(index: Tensor, batch_size: int) -> Tensor:
    """The sequences to keep, as integers within the batch."""
    index = torch.as_tensor(index)
    integer = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    if not integer or index.dim() != 1 or index.numel() == 0 or index.min() < 0 or index.max() >= batch_size:
        raise UserError(
            f"index is {index.tolist()}; it must be a list of sequences between 0 and {batch_size - 1}"
        )
    return index


class MixerState:
    """Keys, values, the latest layer inputs (for the convolution) and ``starts`` of every position so far.

    Each layer needs a state of its own, and extends it by a whole call or, if the call fails, not at all. ``reorder``,
    ``repeat``, ``crop``, ``detach`` and ``to`` change the state and return it; ``clone`` branches it.
    """

    def __init__(self, batch_size: int, config: MixerConfig, *, rollback: int):
        self.batch_size = batch_size
        self.config = config
        self.rollback = rollback
        self.length = 0
        self.starts: Tensor | None = (
            None  # int64 [B, T], as the caller gave them; None if none was ever given
        )
        self._keys, self._values, self._inputs = Rows(), Rows(), Rows()

    @property
    def keys(self) -> Tensor | None:
        """``[B, T, H, Dk]``"""
        return self._keys.get()

    @property
    def values(self) -> Tensor | None:
        """``[B, T, H, Dv]``"""
        return self._values.get()

    @property
    def inputs(self) -> Tensor | None:
        """``[B, at least conv_history + rollback if there were as many, D]``, the latest; None without a convolution"""
        return self._inputs.get()

    @property
    def conv_history(self) -> int:
        """Inputs before its own that a position's convolution sees."""
        return self.config.conv_kernel - 1 if self.config.conv else 0

    # The layer's side: the first three offer new positions, ``commit`` takes them in.

    def offer_starts(self, starts: Tensor, new: int) -> Tensor:
        """``starts``, ``[B]`` or ``[B, new]``, of the next ``new`` positions; returns those of all, ``[B, T]``."""
        rows = starts[:, None].expand(-1, new) if starts.dim() == 1 else starts
        past = rows.new_zeros(rows.shape[0], self.length) if self.starts is None else self.starts
        return torch.cat([past, rows], dim=1)

    def offer_inputs(self, x: Tensor) -> Tensor:
        """``x`` behind the earlier inputs that its convolution reaches back to, ``[B, <= conv_history + T, D]``."""
        known = self._inputs.extended(x)
        count = min(known.shape[1], self.conv_history + x.shape[1])
        return known.narrow(1, known.shape[1] - count, count)

    def offer(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all positions, the new ones last."""
        self._check_kind(keys, values)
        return self._keys.extended(keys), self._values.extended(values)

    def caches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, in the dtype of x, with room for as many new ones, which the caller writes behind ``length``."""
        self._check_kind(x, x)
        config, new = self.config, x.shape[1]
        return (
            self._keys.room(new, x, (config.num_branches, config.qk_dim)),
            self._values.room(new, x, (config.num_heads, config.vo_dim)),
        )

    def input_cache(self, x: Tensor) -> tuple[Tensor, int]:
        """The buffer of inputs, with room for x, which the caller writes behind the number of them that is returned."""
        return self._inputs.room(x.shape[1], x, x.shape[2:]), self._inputs.length

    def check_inputs(self, x: Tensor) -> None:
        """Before anything is written: a call that fails leaves the state as it was."""
        if self.config.conv:
            require_kind(self._inputs.buffer, x)

    def _check_kind(self, keys: Tensor, values: Tensor) -> None:
        require_kind(self._keys.buffer, keys)
        require_kind(self._values.buffer, values)

    def commit(self, new: int, starts: Tensor | None) -> None:
        """Take in the ``new`` positions that were offered; ``starts`` of all, as ``offer_starts`` gave them."""
        self.length += new
        self._keys.length = self._values.length = self.length
        self.starts = starts
        if self.config.conv:
            self._inputs.length += new
            self._inputs.keep_last(self.conv_history + self.rollback)

    def last_starts(self) -> Tensor | None:
        """``starts`` of the last position, ``[B]``, with which a caller who gives none goes on: the same padding or document."""
        if self.starts is None:
            return None
        return starts_to_go_on(self.starts, self.length)

    # The user's side.

    def reorder(self, index: Tensor) -> Self:
        """Sequence ``index[i]`` becomes sequence i; any number of them, as beam search needs."""
        index = check_index(index, self.batch_size)
        self._map(lambda x: x.index_select(0, index.to(x.device)))
        self.batch_size = index.numel()
        return self

    def repeat(self, times: int) -> Self:
        """Each sequence ``times`` times in a row."""
        if times < 1:
            raise UserError(f"times is {times}; it must be at least 1")
        return self.reorder(torch.arange(self.batch_size).repeat_interleave(times))

    def crop(self, length: int) -> Self:
        """Forget all but the first ``length`` positions."""
        if not 0 <= length <= self.length:
            raise UserError(
                f"length is {length}; the state can be cropped to between 0 and {self.length} positions"
            )
        kept = self._inputs.length - (self.length - length)
        missing = min(length, self.conv_history) - kept
        if self.config.conv and length > 0 and missing > 0:
            raise UserError(
                f"cannot crop to {length} of {self.length} positions: the convolution needs {missing} inputs that are forgotten; "
                f"keep more with new_state(..., rollback={self.rollback + missing})"
            )
        self.length = self._keys.length = self._values.length = length
        self._inputs.length = max(0, kept) if length > 0 else 0
        self.starts = None if self.starts is None or length == 0 else self.starts[:, :length]
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast, as ``Tensor.to``; ``starts`` stay integers."""
        self._map(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x)
        if self.starts is not None and self.keys is not None:
            self.starts = self.starts.to(self.keys.device)
        return self

    def detach(self) -> Self:
        """Cut the gradient: later calls do not reach back into earlier ones."""
        self._map(torch.detach)
        return self

    @property
    def device(self) -> torch.device | None:
        return None if self.keys is None else self.keys.device

    def __repr__(self) -> str:
        keys = "empty" if self.keys is None else f"{self.keys.dtype} on {self.keys.device}"
        return f"MixerState(batch_size={self.batch_size}, length={self.length}, {keys})"

    def clone(self) -> "MixerState":
        other = MixerState(self.batch_size, self.config, rollback=self.rollback)
        other.__dict__.update(self.__dict__)
        other._map(torch.clone)
        return other

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        self._keys, self._values, self._inputs = (
            Rows(changed(rows.get())) for rows in (self._keys, self._values, self._inputs)
        )
        self.starts = changed(self.starts)
