"""What the peers share: the call of a ``Mixer``, its decoding state, its contract.

Shapes: B batch, T new positions, P positions in the state, D hidden size.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hypermlp.config import is_integer, require
from hypermlp.errors import UserError
from hypermlp.layers.state import Rows, check_index, require_kind, starts_to_go_on
from hypermlp.ops.api import autocast_enabled
from hypermlp.ops.layout import check_starts_form, raise_where, row_starts


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """What every peer has; each adds its own documented fields."""

    name: ClassVar[str]

    hidden_size: int
    """Width of the layer's input and output."""
    max_length: int
    """Of the model's context; the peers hold nothing that depends on it."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices."""

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))  # annotations may be strings
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if kind is int:
                least = 0 if field.default == 0 else 1
                require(
                    field.name, value, is_integer(value) and value >= least, f"an integer, {least} or more"
                )
            elif kind is float:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                require(field.name, value, is_number and 0 < value < math.inf, "a positive finite number")

    def fill(self, name: str, value: int) -> None:
        """Give a field that was left at 0 its value, which follows from others."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, max(1, value))

    def choose_heads(self, *, width: int = 64, least: int = 1, multiple: int = 1) -> None:
        """The field ``num_heads``, if it was left at 0: heads of about this width. ``multiple``: what a head's width must divide by."""
        hidden, parts = self.hidden_size, self.hidden_size // multiple
        require(
            "hidden_size", hidden, hidden % multiple == 0 and hidden >= multiple, f"a multiple of {multiple}"
        )
        self.fill("num_heads", largest_divisor(parts, max(least, hidden // width)))
        heads: int = self.num_heads  # type: ignore[attr-defined]
        rule = (
            f"a divisor of hidden_size = {hidden}"
            if multiple == 1
            else f"a divisor of hidden_size / {multiple} = {parts}"
        )
        require("num_heads", heads, parts % heads == 0, rule)


def largest_divisor(number: int, most: int) -> int:
    """Of a number, not above ``most``."""
    return next((count for count in range(most, 0, -1) if number % count == 0), 1)


class BaselineState:
    """What a peer remembers: tensors of fixed size by name, and rows that grow with the positions.

    Each layer needs a state of its own, and extends it by a whole call or, if the call fails, not at all. ``reorder``,
    ``repeat``, ``crop``, ``detach`` and ``to`` change the state and return it; ``clone`` branches it.
    """

    def __init__(self, batch_size: int, config: BaselineConfig):
        self.batch_size = batch_size
        self.config = config
        self.length = 0
        # int64 [B, T], as the caller gave them, of all positions or, for a recurrence, of the last one; None if none was ever given
        self.starts: Tensor | None = None
        self._fixed: dict[str, Tensor] = {}
        self._offered: dict[str, Tensor] = {}
        self._rows: dict[str, Rows] = {}

    # The layer's side: tensors that a call sets are taken in by ``commit``.

    def get(self, name: str) -> Tensor | None:
        known = self._fixed.get(name)
        if (
            known is not None
            and not torch.compiler.is_compiling()
            and known.is_inference()
            and not torch.is_inference_mode_enabled()
        ):
            return known.clone()  # autograd does not take the other
        return known

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._offered[name] = value

    def extended(self, name: str, new: Tensor) -> Tensor:
        """All rows of this name, ``[B, P + T, ...]``, the new ones last."""
        if self.length == 0:
            self._rows[name] = Rows()
        rows = self._rows[name]
        require_kind(rows.buffer, new)
        return rows.extended(new)

    def next_starts(self) -> Tensor | None:
        """With which a caller who gives none goes on, ``[B]``."""
        return None if self.starts is None else starts_to_go_on(self.starts, self.length)

    def commit(self, new: int, starts: Tensor | None, *, recurrent: bool) -> None:
        """Take in what was offered. ``starts``: ``[B]`` or ``[B, new]``."""
        if starts is not None:
            rows = starts[:, None].expand(-1, new) if starts.dim() == 1 else starts
            past = rows.new_zeros(rows.shape[0], self.length) if self.starts is None else self.starts
            self.starts = rows[:, -1:].clone() if recurrent else torch.cat([past, rows], dim=1)
        self.length += new
        self._fixed.update(self._offered)
        self._offered = {}
        for held in self._rows.values():
            held.length = self.length

    # The user's side.

    def tensors(self) -> Iterator[Tensor]:
        """What decoding has to keep."""
        yield from self._fixed.values()
        yield from (rows for rows in (held.get() for held in self._rows.values()) if rows is not None)

    @property
    def device(self) -> torch.device | None:
        return next((x.device for x in self.tensors()), None)

    def reorder(self, index: Tensor) -> Self:
        """Sequence ``index[i]`` becomes sequence i; any number of them, as beam search needs."""
        index = check_index(index, self.batch_size)
        self._map(lambda x: x.index_select(0, index.to(x.device)))
        self.batch_size = index.numel()
        return self

    def repeat(self, times: int) -> Self:
        """Each sequence ``times`` times in a row."""
        require("times", times, is_integer(times) and times > 0, "a positive integer")
        return self.reorder(torch.arange(self.batch_size).repeat_interleave(times))

    def crop(self, length: int) -> Self:
        """Forget all but the first ``length`` positions. What a recurrence has taken in stays, so it can only forget all."""
        if not 0 <= length <= self.length:
            raise UserError(
                f"length is {length}; the state can be cropped to between 0 and {self.length} positions"
            )
        if length == 0:
            self.__init__(self.batch_size, self.config)  # type: ignore[misc]
        elif length < self.length:
            if self._fixed:
                raise UserError(
                    f"cannot crop to {length} of {self.length} positions: a recurrence does not go back; clone() a state before"
                )
            self.length = length
            for rows in self._rows.values():
                rows.length = length
            self.starts = None if self.starts is None else self.starts[:, :length]
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast, as ``Tensor.to``; ``starts`` stay integers."""
        self._map(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x)
        if self.starts is not None and self.device is not None:
            self.starts = self.starts.to(self.device)
        return self

    def detach(self) -> Self:
        """Cut the gradient: later calls do not reach back into earlier ones."""
        self._map(torch.detach)
        return self

    def clone(self) -> "BaselineState":
        other = BaselineState(self.batch_size, self.config)
        other.length, other.starts = self.length, self.starts
        other._fixed, other._rows = dict(self._fixed), dict(self._rows)
        other._map(torch.clone)
        return other

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._fixed = {name: change(x) for name, x in self._fixed.items()}
        self._rows = {
            name: Rows(change(x))
            for name, x in ((n, rows.get()) for n, rows in self._rows.items())
            if x is not None
        }
        self.starts = None if self.starts is None else change(self.starts)

    def __repr__(self) -> str:
        held = sum(x.numel() * x.itemsize for x in self.tensors())
        return f"{type(self).__name__}({self.config.name}, batch_size={self.batch_size}, length={self.length}, {held} bytes)"


class Baseline(nn.Module):
    """A sequence mixer, ``[B, T, D] -> [B, T, D]``, causal, in the place of a ``Mixer``. Subclasses write ``mix``."""

    recurrent: ClassVar[bool] = True
    """Does it forget single positions? Then ``starts`` can begin documents, but not slide along as a window."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Parameters of two dimensions that are no matrices: weight decay leaves them alone."""
    o_proj: nn.Module

    def __init__(self, config: BaselineConfig):
        super().__init__()
        self.config = config

    def initial_values(self) -> dict[str, Tensor]:
        """Values of the parameters that are neither matrices, biases nor norms, by name."""
        return {}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices N(0, init_std), biases zero, norms one, everything else as ``initial_values`` says."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm | nn.GroupNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
                if isinstance(module, nn.GroupNorm):
                    nn.init.zeros_(module.bias)
        for name, value in self.initial_values().items():
            self.get_parameter(name).copy_(value)

    def new_state(self, batch_size: int) -> BaselineState:
        """An empty decoding state."""
        require("batch_size", batch_size, is_integer(batch_size) and batch_size > 0, "a positive integer")
        return BaselineState(batch_size, self.config)

    def forward(
        self, x: Tensor, *, state: BaselineState | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Mix ``x``, ``[B, T, D]``. ``state`` and ``starts`` as for a ``Mixer``."""
        self._check(x, state, starts)
        past = 0 if state is None else state.length
        new, total = x.shape[1], past + x.shape[1]
        if starts is None and state is not None:
            starts = state.next_starts()
        reach = None
        if starts is not None:
            starts = starts.long()
            padding = state is not None and starts.dim() == 1  # may go on in a later chunk
            rows = row_starts(starts.clamp(max=total) if padding else starts, new, total, -1)
            reach = (
                torch.arange(past + 1, total + 1, device=x.device) - rows
            )  # positions that each one sees, itself included
            if self.recurrent:
                self._check_documents(
                    reach, past, None if state is None or state.starts is None else state.starts[:, -1]
                )
            x = x.masked_fill(
                (reach < 1)[:, :, None], 0
            )  # padding: whatever stands there, even NaN, goes no further
        out: Tensor = self.mix(x, state, reach)
        if reach is not None:
            out = out.masked_fill((reach < 1)[:, :, None], 0)
        if state is not None:
            state.commit(new, starts, recurrent=self.recurrent)  # nothing can fail any more
        return out

    def mix(self, x: Tensor, state: BaselineState | None, reach: Tensor | None) -> Tensor:
        """``reach``: int64 ``[B, T]``, how many positions each one sees, itself included; None for all, 0 for padding."""
        raise NotImplementedError

    def core_flops(self, queries: int, keys: int) -> int:
        """FLOPs of everything but matrices and convolutions, for the last ``queries`` of ``keys`` positions of one sequence."""
        raise NotImplementedError

    def _check_documents(self, reach: Tensor, past: int, known: Tensor | None) -> None:
        before = (
            torch.full_like(reach[:, :1], past) if known is None else (past - known[:, None]).clamp(min=0)
        )
        expected = torch.cat([before, reach[:, :-1]], dim=1) + 1
        raise_where(
            (reach > 1) & (reach != expected),
            f"{self.config.name} is a recurrence: it can begin anew at a position, but not forget older ones one by one as a window does",
            "starts that stay, or move to their own position",
            reach,
        )

    def _check(self, x: Tensor, state: BaselineState | None, starts: Tensor | None) -> None:
        require("x", type(x), isinstance(x, Tensor), "a tensor")
        if x.dim() != 3 or x.shape[-1] != self.config.hidden_size or 0 in x.shape:
            raise UserError(
                f"x has shape {list(x.shape)}; it must be [batch, positions, {self.config.hidden_size}], none empty"
            )
        weight = next(self.parameters())
        if x.dtype != weight.dtype and not autocast_enabled(x.device.type):
            raise UserError(
                f"x is {x.dtype}, the layer {weight.dtype}; cast one of them, or use torch.autocast"
            )
        if state is not None and (not isinstance(state, BaselineState) or state.config != self.config):
            raise UserError(
                f"the state belongs to another layer, {state!r}; make one with this layer's new_state"
            )
        if state is not None and state.batch_size != x.shape[0]:
            raise UserError(
                f"x has batch size {x.shape[0]}, the state {state.batch_size}; make one with new_state(batch_size={x.shape[0]})"
            )
        if starts is not None:
            check_starts_form(starts, x)

    def extra_repr(self) -> str:
        own = (f.name for f in dataclasses.fields(self.config) if f.name not in ("init_std", "max_length"))
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in own)


def remembered(state: BaselineState | None, name: str) -> Tensor | None:
    return None if state is None else state.get(name)
