"""What a mixer remembers while decoding.

Shapes: B batch, T positions so far, H heads, Dk, Dv widths, D layer width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Rows:
    """A tensor that grows along dim 1: in place, in a buffer that doubles, wherever no gradient has to flow."""

    def __init__(self, buffer: Tensor | None = None):
        self.buffer = buffer
        self.length = 0 if buffer is None else buffer.shape[1]

    def get(self) -> Tensor | None:
        return None if self.buffer is None else self.buffer[:, : self.length]

    def append(self, new: Tensor) -> Tensor:
        past, total = self.get(), self.length + new.shape[1]
        if past is None or self.buffer is None:
            self.buffer = new
        elif torch.is_grad_enabled() and (past.requires_grad or new.requires_grad):
            self.buffer = torch.cat([past, new], dim=1)
        else:
            stuck = self.buffer.requires_grad or (self.buffer.is_inference() and not torch.is_inference_mode_enabled())
            if stuck or self.buffer.shape[1] < total:
                self.buffer = past.new_empty(past.shape[0], max(64, 2 * total), *past.shape[2:])
                self.buffer[:, : self.length] = past
            self.buffer[:, self.length : total] = new
        self.length = total
        return self.buffer[:, :total]

    def crop(self, length: int) -> None:
        self.length = min(length, self.length)


class MixerState:
    """Keys, values, the latest layer inputs (for the convolution) and ``starts`` of every position so far.

    Memory grows by doubling and is written in place; with gradients enabled it is concatenated instead, so that training
    through a state works. ``reorder``, ``repeat``, ``crop`` and ``to`` change the state and return it; ``clone`` branches it.
    """

    def __init__(self, batch_size: int, *, conv_history: int, rollback: int):
        self.batch_size = batch_size
        self.length = 0
        self.conv_history = conv_history
        self.rollback = rollback
        self._keys, self._values = _Rows(), _Rows()
        self.inputs: Tensor | None = None  # [B, <= conv_history + rollback, D], the latest
        self.starts: Tensor | None = None  # int [B, T], as the caller gave them

    @property
    def keys(self) -> Tensor | None:
        """``[B, T, H, Dk]``"""
        return self._keys.get()

    @property
    def values(self) -> Tensor | None:
        """``[B, T, H, Dv]``"""
        return self._values.get()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in new positions; returns the keys and values of all."""
        self.length += keys.shape[1]
        return self._keys.append(keys), self._values.append(values)

    def conv_inputs(self, x: Tensor) -> Tensor:
        """``x`` behind the earlier inputs that its convolution reaches back to, ``[B, <= conv_history + T, D]``; remembers ``x``."""
        known = x if self.inputs is None else torch.cat([self.inputs, x], dim=1)
        self.inputs = known[:, -(self.conv_history + self.rollback) :]
        return known[:, -(self.conv_history + x.shape[1]) :]

    def last_starts(self) -> Tensor | None:
        """``starts`` of the last position, ``[B]``, with which a caller who gives none goes on; None if none was ever given."""
        return None if self.starts is None else self.starts[:, -1]

    def remember_starts(self, starts: Tensor, new: int) -> None:
        """Note ``starts``, ``[B]`` or ``[B, new]``, for the next ``new`` positions."""
        rows = starts[:, None].expand(-1, new) if starts.dim() == 1 else starts
        past = rows.new_zeros(rows.shape[0], self.length) if self.starts is None else self.starts
        self.starts = torch.cat([past, rows], dim=1)

    def reorder(self, index: Tensor) -> MixerState:
        """Sequence ``index[i]`` becomes sequence i; any number of them, as beam search needs."""
        index = torch.as_tensor(index)
        if index.dim() != 1 or index.numel() == 0 or index.min() < 0 or index.max() >= self.batch_size:
            raise ValueError(f"index is {index.tolist()}; it must be a list of sequences between 0 and {self.batch_size - 1}")
        self._map(lambda x: x.index_select(0, index.to(x.device)))
        self.batch_size = index.numel()
        return self

    def repeat(self, times: int) -> MixerState:
        """Each sequence ``times`` times in a row."""
        if times < 1:
            raise ValueError(f"times is {times}; it must be at least 1")
        return self.reorder(torch.arange(self.batch_size).repeat_interleave(times))

    def crop(self, length: int) -> MixerState:
        """Forget all but the first ``length`` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; the state can be cropped to between 0 and {self.length} positions")
        dropped = self.length - length
        if self.inputs is not None:
            kept = self.inputs.shape[1] - dropped
            if kept < min(length, self.conv_history):
                raise ValueError(
                    f"cannot crop {dropped} positions: the convolution needs inputs from before them, and the state keeps enough of them "
                    f"for {self.rollback} at most; ask for more with new_state(..., rollback={dropped})"
                )
            self.inputs = self.inputs[:, : max(0, kept)]
        self._keys.crop(length)
        self._values.crop(length)
        self.starts = None if self.starts is None else self.starts[:, :length]
        self.length = length
        return self

    def to(self, *args: Any, **kwargs: Any) -> MixerState:
        """Move or cast, as ``Tensor.to``; ``starts`` stay integers."""
        self._map(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x)
        if self.starts is not None and self.keys is not None:
            self.starts = self.starts.to(self.keys.device)
        return self

    def clone(self) -> MixerState:
        other = MixerState(self.batch_size, conv_history=self.conv_history, rollback=self.rollback)
        other.__dict__.update(self.__dict__)
        other._map(torch.clone)
        return other

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        self._keys, self._values = _Rows(changed(self.keys)), _Rows(changed(self.values))
        self.inputs, self.starts = changed(self.inputs), changed(self.starts)
