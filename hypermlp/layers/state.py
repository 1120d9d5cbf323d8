"""What a layer remembers while decoding.

Shapes: B batch, T positions so far, H heads, Dk, Dv widths, D hidden size.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.layers.growing import GrowingRows, only_for_inference
from hypermlp.layers.visibility import Visibility, following_starts
from hypermlp.ops.layout import raise_where
from hypermlp.validation import is_integer, require


def require_kind(known: Tensor | None, new: Tensor) -> None:
    """Raise if ``new`` differs in dtype or device from what the state holds."""
    if known is not None and (known.dtype, known.device) != (new.dtype, new.device):
        raise UserError(
            f"the state holds {known.dtype} on {known.device}, this call makes {new.dtype} on {new.device}; "
            "decode under the same autocast as the prompt, or move the state with state.to(...)"
        )


class DecodingState:
    """The cache of one layer during decoding. Get it from ``layer.new_state``; the layer's calls fill it.

    If a call raises, the state is unchanged. ``batch_size`` is the number of sequences, ``length`` the number
    of positions so far. ``reorder``, ``repeat``, ``crop``, ``detach`` and ``to`` change the state in place
    and return it; ``clone`` returns an independent copy. The other methods are for authors of layers: during
    a call, a layer offers new rows and tensors (``extended``, ``room``, ``state[name] = tensor``); ``commit``
    at the end (in a model, ``take_in``) takes them all in, so that a call that fails changes nothing.

    Example::

        import torch
        from hypermlp import HyperGLU

        layer, x = HyperGLU(64, max_length=128), torch.randn(2, 10, 64)
        with torch.no_grad():
            state = layer.new_state(batch_size=2)
            layer(x, state=state)
            other = state.clone().crop(8)  # without the last 2 positions; state keeps 10
            state.reorder(torch.tensor([1, 1, 0]))  # three sequences: number 1 twice, then number 0
            other.repeat(2)  # four sequences: 0, 0, 1, 1
        assert (state.batch_size, state.length, other.batch_size, other.length) == (3, 10, 4, 8)
    """

    capacity: int | None = None
    """The most positions that the state holds at once; None for any number."""
    ring_rows: int | None = None
    """Rows of the rings that hold keys and values; None if they are not in rings."""
    limit: int | None = None
    """The most positions that the state takes without ``starts``; None for any number."""
    in_model: bool = False
    """Whether the layer's calls leave ``take_in`` to the model around the layer, which may still fail."""

    def __init__(
        self,
        batch_size: int,
        config: Any,
        *,
        rollback: int = 128,
        recurrent: bool = False,
        window: int | None = None,
    ):
        """Make an empty state.

        Args:
            batch_size: number of sequences.
            config: the configuration of the layer that the state belongs to.
            rollback: how many positions ``crop`` can remove where a convolution needs earlier inputs.
            recurrent: whether the layer folds positions into tensors of fixed size, so that none can be
                removed.
            window: how many positions a position sees, itself included; older ones are dropped, except for
                ``rollback`` of them. None for all.
        """
        self.batch_size, self.config = batch_size, config
        self.rollback, self.recurrent, self.window = rollback, recurrent, window
        self._past: int | Tensor = 0
        self._rows: dict[str, GrowingRows] = {}
        self._needed: dict[str, int] = {}  # rows before a position that the next one needs, where not all
        self._fixed: dict[str, Tensor] = {}
        self._offered: dict[str, Tensor] = {}

    @property
    def length(self) -> int:
        """The number of positions so far."""
        return int(self._past)

    @property
    def past(self) -> int | Tensor:
        """``length`` as an int; for a ``StaticState`` after its first call, a tensor on the device."""
        return self._past

    @property
    def origins(self) -> Tensor | None:
        """Where the last position's document begins, int64 ``[B]``; None for 0."""
        origins = self.rows("origins")
        return None if origins is None else origins[:, -1]

    # For layers: a call offers new rows and tensors, and ``commit`` takes them in.

    def get(self, name: str) -> Tensor | None:
        """For layers: return the tensor of fixed size with this name, None if there is none yet."""
        known = self._fixed.get(name)
        return known.clone() if known is not None and only_for_inference(known) else known

    def __setitem__(self, name: str, value: Tensor) -> None:
        """For layers: offer a tensor of fixed size."""
        self._offered[name] = value

    def rows(self, name: str) -> Tensor | None:
        """For layers: return the rows so far, ``[B, T, ...]``, or the latest if older ones were dropped."""
        return self._rows[name].get() if name in self._rows else None

    def extended(self, name: str, new: Tensor, *, needed: int | None = None) -> Tensor:
        """For layers: offer rows ``new`` of the new positions and return all rows of this name, the new ones
        last.

        ``needed``: how many rows before a position the layer needs to compute it, such as conv_kernel - 1;
        older ones are dropped, except for ``rollback`` of them. None: all rows that a window reaches to.
        """
        return self._named(name, new, needed).extended(new)

    def with_history(self, name: str, new: Tensor, history: int) -> Tensor:
        """Offer rows of the new positions and return them after those that a convolution reaches back to.

        The result is ``[B, <= history + T, ...]``; missing rows stand for zeros.
        """
        known = self.extended(name, new, needed=history)
        count = min(known.shape[1], history + new.shape[1])
        return known.narrow(1, known.shape[1] - count, count)

    def room(
        self, name: str, new: Tensor, shape: tuple[int, ...], *, needed: int | None = None
    ) -> tuple[Tensor, int]:
        """For layers: return a buffer with room for one row of ``shape`` for each position of ``new``, and
        the index of the first of them; what the caller writes there is offered.
        """
        rows = self._named(name, new, needed)
        return rows.room(new.shape[1], new, shape), rows.held

    def _named(self, name: str, new: Tensor, needed: int | None) -> GrowingRows:
        if name not in self._rows or self.length == 0:
            self._rows[name] = GrowingRows()
        if needed is None and self.window is not None:
            needed = self.window - 1
        if needed is not None:
            self._needed[name] = needed
            self._rows[name].kept = needed + self.rollback
        require_kind(self._rows[name].buffer, new)
        return self._rows[name]

    def check_kind(self, name: str, new: Tensor) -> None:
        """For layers: raise if rows of this name have another dtype or device than ``new``."""
        if name in self._rows and self.length > 0:
            require_kind(self._rows[name].buffer, new)

    @property
    def starts(self) -> Tensor | None:
        """``starts`` of the positions so far, int64 ``[B, T]``, or the last of them; None if never given."""
        return self.rows("starts")

    def following_starts(self) -> Tensor | None:
        """For layers: return the ``starts`` ``[B]`` of a call that is given none; None if none were ever
        given.

        A sliding window raises: it cannot be continued without being given.
        """
        return None if self.starts is None else following_starts(self.starts, self.length)

    def commit(self, visibility: Visibility) -> None:
        """For layers: take in what was offered during a call. Nothing may fail afterwards."""
        if not self.in_model:
            self.take_in(visibility)

    def take_in(self, visibility: Visibility) -> None:
        """Take in the offered rows and tensors; a model calls it once all blocks have succeeded."""
        if visibility.starts is not None:
            given = visibility.starts
            given = given[:, None].expand(-1, visibility.new) if given.dim() == 1 else given
            self._keep_numbers("starts", given)
            origins = visibility.origins()
            assert origins is not None
            self._keep_numbers("origins", origins)
        self._past = self.length + visibility.new
        self._fixed.update(self._offered)
        self._offered = {}
        for rows in self._rows.values():
            rows.length = self.length
            rows.drop_oldest()

    @torch.no_grad()
    def _keep_numbers(self, name: str, new: Tensor) -> None:
        """Extend ``starts`` or ``origins`` by those of the new positions, ``[B, T]``; before the first, they
        are 0.
        """
        few = 2 if self.recurrent or self.window is not None else None
        if self.rows(name) is None and self.length > 0:
            count = self.length if few is None else min(self.length, few + self.rollback)
            self._rows[name] = GrowingRows(new.new_zeros(new.shape[0], count), self.length - count)
        self.extended(name, new, needed=few)

    # For users.

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that decoding has to keep, apart from ``starts``; their sizes are its memory."""
        yield from self._fixed.values()
        held = (rows.get() for name, rows in self._rows.items() if name not in ("starts", "origins"))
        yield from (rows for rows in held if rows is not None)

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; None before the first call."""
        return next((x.device for x in self.tensors()), None)

    def reorder(self, index: Tensor) -> Self:
        """Select sequences, as beam search needs: the new sequence i is the old sequence ``index[i]``.

        Changes the state in place and returns it.

        Args:
            index: integers ``[n]``, each between 0 and batch_size - 1, in any order and with repetitions; n
                becomes the batch size. Other values raise UserError.
        """
        index = torch.as_tensor(index)
        integer = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        allowed = f"a list of sequences between 0 and {self.batch_size - 1}"
        if not integer or index.dim() != 1 or index.numel() == 0:
            raise UserError(f"index is {index.tolist()}; it must be {allowed}")
        raise_where((index < 0) | (index >= self.batch_size), "index has an impossible value", allowed, index)
        self._select(index)
        self.batch_size = index.numel()
        return self

    def _select(self, index: Tensor) -> None:
        self._change(lambda x: x.index_select(0, index.to(x.device)))

    def repeat(self, times: int) -> Self:
        """Repeat each sequence ``times`` times (1 or more), like ``torch.repeat_interleave``.

        For 2, sequences 0, 1 become 0, 0, 1, 1. Changes the state in place and returns it.
        """
        require("times", times, is_integer(times) and times > 0, "a positive integer")
        return self.reorder(torch.arange(self.batch_size).repeat_interleave(times))

    def crop(self, length: int) -> Self:
        """Keep the first ``length`` positions and forget the later ones, in place; return the state.

        A ``length`` of 0 empties any state. In a layer with a convolution or a sliding window, at least the
        last ``rollback`` positions can be removed, and more as long as what they need was not dropped.

        Raises:
            UserError: if the state is shorter, if the layer is a recurrence, or if positions that the
                convolution or the window needs were dropped. Nothing changes then.
        """
        if not 0 <= length <= self.length:
            raise UserError(
                f"length is {length}; the state can be cropped to between 0 and {self.length} positions"
            )
        if length == self.length:
            return self
        if length > 0:
            self._check_crop(length)
        for rows in self._rows.values():
            rows.length = max(length, rows.forgotten)
        self._past = length
        if length == 0:
            self._rows, self._fixed = {}, {}
        return self

    def _check_crop(self, length: int) -> None:
        if self._fixed:
            raise UserError(
                f"cannot crop to {length} of {self.length} positions: a recurrence does not go back; "
                "clone() the state before the positions that may be taken back"
            )
        for name, rows in self._rows.items():
            missing = rows.forgotten - max(0, length - self._needed.get(name, length))
            if missing > 0:
                part = "convolution" if self.window is None else "convolution or sliding window"
                raise UserError(
                    f"cannot crop to {length} of {self.length} positions: the {part} needs {missing} "
                    "positions that were dropped; keep more with "
                    f"new_state(..., rollback={self.rollback + missing})"
                )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the state in place, with the arguments of ``Tensor.to``, and return it.

        Integers are only moved.
        """
        self._change(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x)
        device = self.device
        if device is not None:
            self._change(lambda x: x.to(device))
        return self

    def detach(self) -> Self:
        """Cut the gradient, in place, and return the state: later backward passes stop here."""
        self._change(torch.detach)
        return self

    def clone(self) -> Self:
        """Return an independent copy, for example to continue one prompt in two ways.

        Gradients flow through it.
        """
        other = copy.copy(self)
        other._change(torch.clone)
        return other

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._fixed = {name: change(x) for name, x in self._fixed.items()}
        self._rows = {name: rows.changed(change) for name, rows in self._rows.items()}
        self._needed, self._offered = dict(self._needed), {}

    def __repr__(self) -> str:
        held = sum(x.numel() * x.itemsize for x in self.tensors())
        return f"{type(self).__name__}(batch_size={self.batch_size}, length={self.length}, {held} bytes)"


class MixerState(DecodingState):
    """The decoding state of a ``Mixer``: keys, values and, with a convolution, the latest inputs.

    Its T positions are those that it received; registers are not stored. Users call ``reorder``, ``repeat``,
    ``crop``, ``clone``, ``to`` and ``detach``, and read ``batch_size`` and ``length``; the other methods are
    for authors of layers. ``DecodingState`` has an example.
    """

    @property
    def keys(self) -> Tensor | None:
        """``[B, T, num_branches, qk_dim]``, rotated if the layer has RoPE; None before the first call."""
        return self.rows("keys")

    @property
    def values(self) -> Tensor | None:
        """``[B, T, num_heads, vo_dim]``; None before the first call."""
        return self.rows("values")

    @property
    def inputs(self) -> Tensor | None:
        """``[B, n, D]``: the latest n inputs, at least conv_kernel - 1 of them once there are so many.

        None before the first call, and without a convolution.
        """
        return self.rows("inputs")
