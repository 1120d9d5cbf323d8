"""What the baselines share: a configuration that checks its fields, and the documents of a recurrence."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypermlp.config import is_integer, require
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.layout import raise_where


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """The fields of every baseline; each adds its own documented ones."""

    name: ClassVar[str]

    hidden_size: int
    """Width of the layer's input and output."""
    max_length: int
    """Length of the model's context; no baseline has a parameter that depends on it."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices."""

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))  # annotations may be strings
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if kind is int:
                least = 0 if field.default == 0 else 1
                allowed = f"an integer, {least} or more"
                require(field.name, value, is_integer(value) and value >= least, allowed)
            elif kind is float:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                require(field.name, value, is_number and 0 < value < math.inf, "a positive finite number")

    def fill(self, name: str, value: int) -> None:
        """Give a field that was left at 0 its value, which follows from others."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, max(1, value))

    def choose_heads(self, *, width: int = 64, least: int = 1, multiple: int = 1) -> None:
        """Set ``num_heads`` if it was left at 0, to heads of about this width; check it otherwise.

        ``multiple`` is what the width of a head must be divisible by.
        """
        hidden, parts = self.hidden_size, self.hidden_size // multiple
        require(
            "hidden_size", hidden, hidden % multiple == 0 and hidden >= multiple, f"a multiple of {multiple}"
        )
        self.fill("num_heads", largest_divisor(parts, max(least, hidden // width)))
        heads: int = self.num_heads  # type: ignore[attr-defined]
        of = f"hidden_size = {hidden}" if multiple == 1 else f"hidden_size / {multiple} = {parts}"
        require("num_heads", heads, parts % heads == 0, f"a divisor of {of}")


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not above ``most``."""
    return next((count for count in range(most, 0, -1) if number % count == 0), 1)


class Baseline(SequenceMixer):
    """A sequence mixer of another paper. Subclasses write ``mix`` and ``core_flops``."""

    recurrent: ClassVar[bool] = True

    def _check_visibility(self, visibility: Visibility, state: DecodingState | None) -> None:
        """Raise if a recurrence would have to forget single positions, as a sliding window does."""
        if not self.recurrent or visibility.reach is None:
            return
        known = None if state is None or state.starts is None else state.starts[:, -1:]
        reach, past = visibility.reach, visibility.past
        before = torch.full_like(reach[:, :1], past) if known is None else (past - known).clamp(min=0)
        expected = torch.cat([before, reach[:, :-1]], dim=1) + 1
        raise_where(
            (reach > 1) & (reach != expected),
            f"{self.config.name} is a recurrence: it can start again at a position, but not forget older "
            "positions one "
            "by one, as a sliding window does",
            "starts that stay, or move to their own position",
            reach,
        )

    def extra_repr(self) -> str:
        own = (f.name for f in dataclasses.fields(self.config) if f.name not in ("init_std", "max_length"))
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in own)


def remembered(state: DecodingState | None, name: str) -> Tensor | None:
    """Return a tensor of fixed size from the state; None without a state or before the first call."""
    return None if state is None else state.get(name)
