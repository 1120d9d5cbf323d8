"""A decoding state of fixed size: every step has the same shapes and addresses.

A compiled step then serves every position, and a CUDA graph can be captured once and replayed. The number of
positions is a tensor on the device. Rows lie in rings (see ``hypermlp.ops.ring``): position p is in row
``p mod capacity``, so with a sliding window the stream may be longer than the state.

Shapes: B batch, T new positions, N capacity.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.layers.state import MixerState, require_kind
from hypermlp.layers.visibility import Visibility, refuse_moving_starts
from hypermlp.validation import is_integer, require


class StaticState(MixerState):
    """What a ``Mixer`` remembers, in tensors of fixed size that are written in place.

    The first call, with a prompt of any length, allocates them. Later calls with the same number of positions
    have the same shapes and addresses. From then on ``past`` is a tensor, and ``keys`` and ``values`` have
    ``capacity`` rows (fewer with a sliding window), ``inputs`` those that the convolution needs: position p
    is in row ``p`` modulo the number of rows. ``length`` and ``crop`` copy a number from the device to the
    host.

    Gradients do not flow through such a state: call the layer under ``torch.no_grad()``.
    """

    capacity: int

    ring_rows: int

    def __init__(
        self,
        batch_size: int,
        config: Any,
        *,
        capacity: int,
        rollback: int = 128,
        window: int | None = None,
    ):
        require("capacity", capacity, is_integer(capacity) and capacity > 0, "a positive integer")
        super().__init__(batch_size, config, rollback=rollback, window=window)
        self.capacity = self.ring_rows = self.limit = int(capacity)
        if window is not None and window <= self.capacity:  # the stream may be longer than the ring
            self.ring_rows, self.limit = min(self.capacity, window + rollback), None
        self._rings: dict[str, Tensor] = {}
        self._counter: Tensor | None = None  # int64 [], at a fixed address
        self._indices: dict[
            tuple[int, int], Tensor
        ] = {}  # rows that a call writes, by its length and the ring's
        self._oldest_input = 0  # inputs of earlier positions were overwritten before a crop

    # For layers.

    def rows(self, name: str) -> Tensor | None:
        """Return a ring, ``[B, its rows, ...]``; None before the first call."""
        return self._rings.get(name)

    def extended(self, name: str, new: Tensor, *, needed: int | None = None) -> Tensor:
        """Write rows of the new positions and return all that they may see: the ring, or in the first call
        ``new``.
        """
        self._write(name, new, self.ring_rows)
        return self._rings[name] if isinstance(self._past, Tensor) else new

    def with_history(self, name: str, new: Tensor, history: int) -> Tensor:
        if history == 0:
            return new
        if name not in self._rings:
            self._rings[name] = _ring(new, history + self.rollback)
        self._offered[name] = new  # written by take_in, because a longer call overwrites its own history
        if isinstance(self._past, int):
            return new
        ring = self._rings[name]
        positions = self._past + torch.arange(-history, 0, device=new.device)
        known = ring.index_select(1, positions.remainder(ring.shape[1]))
        return torch.cat([known.masked_fill((positions < 0)[:, None], 0), new], dim=1)

    def check_kind(self, name: str, new: Tensor) -> None:
        if new.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "a state of fixed size carries no gradients; call the layer under torch.no_grad(), or make "
                "the state without capacity"
            )
        if isinstance(self._past, Tensor):
            require_kind(self._rings.get(name), new)
        elif name in self._rings and (self._rings[name].dtype, self._rings[name].device) != (
            new.dtype,
            new.device,
        ):
            del self._rings[name]  # an empty state takes any kind

    @property
    def origins(self) -> Tensor | None:
        return None if isinstance(self._past, int) else self._last("origins")

    def following_starts(self) -> Tensor | None:
        ring = self._rings.get("starts")
        if ring is None or isinstance(self._past, int):
            return None
        return _following_starts(ring, self._past)

    def take_in(self, visibility: Visibility) -> None:
        for name, rows in self._offered.items():
            self._write(name, rows, self._rings[name].shape[1])
        self._offered = {}
        if visibility.starts is not None:
            given = visibility.starts
            given = given[:, None].expand(-1, visibility.new) if given.dim() == 1 else given
            self._write("starts", given, self.ring_rows)
            origins = visibility.origins()  # also without RoPE: another layer of the model may ask for them
            assert origins is not None
            self._write("origins", origins, self.ring_rows)
        if self._counter is None:
            self._counter = _zeros((), torch.int64, visibility.device)
        self._counter.add_(visibility.new)
        self._past = self._counter
        self._indices = {}

    def _write(self, name: str, new: Tensor, size: int) -> None:
        if name not in self._rings:
            self._rings[name] = _ring(new, size)
        count = min(new.shape[1], size)
        key = (new.shape[1], size)
        if key not in self._indices:
            last = torch.arange(new.shape[1] - count, new.shape[1], device=new.device)
            self._indices[key] = (last + self._past).remainder(size)
        self._rings[name].index_copy_(1, self._indices[key], new[:, -count:])

    def _last(self, name: str) -> Tensor | None:
        """Return the row of the last position; None if there is no such ring."""
        ring = self._rings.get(name)
        return None if ring is None else _row(ring, self._past - 1)

    # For users.

    def tensors(self) -> Iterator[Tensor]:
        """Yield what decoding has to keep, apart from ``starts``."""
        yield from (ring for name, ring in self._rings.items() if name not in ("starts", "origins"))

    def crop(self, length: int) -> Self:
        """Keep the first ``length`` positions, in place, and return the state.

        Raises:
            UserError: if the state is shorter, or if rows that the remaining positions need were overwritten:
                the state has received more than its rings hold.
        """
        before = self.length
        if not 0 <= length <= before:
            raise UserError(
                f"length is {length}; the state can be cropped to between 0 and {before} positions"
            )
        if length == before:
            return self
        self._indices = {}
        if length == 0:
            self._past, self._oldest_input = 0, 0
            self._offered = {}
            for ring in (*self._rings.values(), self._counter):
                if ring is not None:
                    ring.zero_()
            return self
        self._check_crop(length)
        assert self._counter is not None
        self._counter.fill_(length)
        return self

    def _check_crop(self, length: int) -> None:
        before = self.length
        first = 0 if self.window is None else max(0, length - self.window + 1)  # the first that is needed
        if before - self.ring_rows > first:
            more = f"capacity={before}" if self.window is None else f"rollback={before - length}"
            raise UserError(
                f"cannot crop to {length} of {before} positions: the state holds {self.ring_rows}, and has "
                f"overwritten the first ones; make one with new_state(..., {more})"
            )
        inputs = self._rings.get("inputs")
        if inputs is None:
            return
        oldest = max(self._oldest_input, before - inputs.shape[1])
        missing = oldest - max(0, length - (self.config.conv_kernel - 1))
        if missing > 0:
            raise UserError(
                f"cannot crop to {length} of {before} positions: the convolution needs {missing} inputs that "
                f"were dropped; keep more with new_state(..., rollback={self.rollback + missing})"
            )
        self._oldest_input = oldest

    def to(self, *args: Any, **kwargs: Any) -> Self:
        super().to(*args, **kwargs)
        if self._counter is not None and self.device is not None:
            self._counter = _fixed(self._counter.to(self.device))
            self._past = self._counter if isinstance(self._past, Tensor) else 0
        return self

    def clone(self) -> Self:
        other = super().clone()
        if self._counter is not None:
            other._counter = _fixed(self._counter.clone())
            other._past = other._counter if isinstance(self._past, Tensor) else 0
        return other

    def _select(self, index: Tensor) -> None:
        if index.numel() != self.batch_size:
            super()._select(index)
            return
        for ring in self._rings.values():  # in place: the addresses stay
            ring.copy_(ring.index_select(0, index.to(ring.device)))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._rings = {name: _fixed(change(ring)) for name, ring in self._rings.items()}
        self._offered, self._indices = {}, {}


def _ring(like: Tensor, rows: int) -> Tensor:
    """Return a ring of zeros: rows that are not filled yet must be finite."""
    return _zeros((like.shape[0], rows, *like.shape[2:]), like.dtype, like.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that it can be written in any mode
        return _fixed(torch.zeros(shape, dtype=dtype, device=device))


def _fixed(x: Tensor) -> Tensor:
    """Mark a tensor as one whose address stays, so that a compiled step may write it inside a CUDA graph.

    That is what torch._dynamo.mark_static_address does, and importing that would import the whole compiler.
    """
    if not torch.compiler.is_compiling():
        x._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return x


def _row(ring: Tensor, position: int | Tensor) -> Tensor:
    index = torch.as_tensor(position, device=ring.device).remainder(ring.shape[1])
    return ring.index_select(1, index[None])[:, 0]


@torch.library.custom_op("hypermlp::following_starts", mutates_args=())
def _following_starts(ring: Tensor, past: Tensor) -> Tensor:
    """Return ``starts`` ``[B]`` for positions after the ``past`` ones whose starts are in the ring.

    This is an operator, so that the values are checked when a graph runs, under torch.compile too.
    """
    last = _row(ring, past - 1)
    refuse_moving_starts(_row(ring, past - 2), last, past)
    return last


@_following_starts.register_fake
def _(ring: Tensor, past: Tensor) -> Tensor:
    return ring.new_empty(ring.shape[0])
