"""What the baselines share: configurations that check their fields, head counts, the layer's base class."""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Generic, TypeVar, dataclass_transform

import torch
from torch import Tensor

from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.baselines.parts import remembered
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.layout import raise_where
from hypermlp.validation import NOT_NEGATIVE, POSITIVE, POSITIVE_NUMBER, require, require_window


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """The settings of a baseline.

    A subclass gives the baseline's ``name`` and adds its own fields, ``int`` or ``float``. It becomes a
    frozen, keyword-only dataclass by itself. An ``int`` whose default is 0 may be 0, which stands for a value
    that follows from the other fields; all other numbers must be positive.
    """

    name: ClassVar[str]

    hidden_size: int
    """Width of the layer's input and output."""
    max_length: int
    """Length of the model's context. No parameter of a baseline depends on it."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))  # field.type may be a string
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if kind in (int, float):
                whole = NOT_NEGATIVE if field.default == 0 else POSITIVE
                rule = (whole if kind is int else POSITIVE_NUMBER)["rule"]
                require(field.name, value, rule.holds(value), rule.allowed)

    def fill(self, name: str, value: int) -> None:
        """Set the field ``name`` to ``value`` if it was left at 0."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How many heads a baseline has by default, and how many it may have."""

    width: int = 64
    """The default is as many heads of at least this width as divide the hidden size."""
    count: int = 0
    """If not 0, the default is this many heads instead, or fewer if so many do not divide the hidden size."""
    least: int = 1
    """The default is at least this many heads, even if they are narrower than ``width``."""
    share: Fraction = Fraction(1)
    """Part of the hidden size that the heads divide among themselves."""
    multiple: int = 1
    """The width of a head must be a multiple of this: 2 for rotary positions, which rotate pairs of
    channels."""

    def checked(self, num_heads: int, hidden_size: int) -> int:
        """Return ``num_heads``, or the default if it is 0. Raise if it does not divide ``hidden_size``."""
        unit = self.share / self.multiple
        pieces = unit * int(hidden_size)  # groups of ``multiple`` channels, which the heads share
        require("hidden_size", hidden_size, pieces.denominator == 1, f"a multiple of {unit.denominator}")
        most = self.count or max(self.least, int(self.share * int(hidden_size)) // self.width)
        num_heads = num_heads or largest_divisor(int(pieces), most)
        whole = "hidden_size" if unit == 1 else f"{unit} of hidden_size"
        require("num_heads", num_heads, pieces % int(num_heads) == 0, f"a divisor of {whole}, {pieces}")
        return num_heads


class MultiHeadConfig(BaselineConfig):
    """The settings of a baseline with heads. A subclass says in ``heads`` how many there are."""

    heads: ClassVar[Heads]

    num_heads: int = 0
    """Number of heads; 0 for the default in ``heads``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("num_heads", self.heads.checked(self.num_heads, self.hidden_size))

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads


class RotaryConfig(MultiHeadConfig):
    """The settings of a baseline with rotary positions, each of which may see a window of positions only."""

    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    sliding_window: int | None = None
    """How many positions each position sees, itself included, at most max_length; None for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_window(self.sliding_window, self.max_length)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``; 1 if ``most`` is 0."""
    return next((count for count in range(most, 0, -1) if number % count == 0), 1)


ConfigOf = TypeVar("ConfigOf", bound=BaselineConfig)


class Baseline(SequenceMixer, Generic[ConfigOf]):
    """A sequence mixer of another paper, built from its configuration: ``class Gla(Baseline[GlaConfig])``.

    A subclass writes ``build``, ``mix`` and ``core_flops``, and ``initial_values`` if it has parameters other
    than matrices, biases and norms.
    """

    recurrent: ClassVar[bool] = True
    Config: ClassVar[type[BaselineConfig]]
    """The class of the configuration, which is the type argument of ``Baseline``."""
    config: ConfigOf

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for generic in cls.__dict__.get("__orig_bases__", ()):
            (cls.Config,) = typing.get_args(generic)

    def __init__(self, config: ConfigOf):
        super().__init__(config)
        self.build(config)
        self.reset_parameters()

    def build(self, config: ConfigOf) -> None:
        """Make the modules and parameters. Their initial values are set afterwards."""
        raise NotImplementedError

    def _check_visibility(self, visibility: Visibility, state: DecodingState | None) -> None:
        """Raise if a recurrence would have to forget single positions, as a sliding window does."""
        if not self.recurrent or visibility.reach is None:
            return
        known = None if state is None or state.starts is None else state.starts[:, -1:]
        reach, past = visibility.reach, visibility.known_past
        before = torch.full_like(reach[:, :1], past) if known is None else (past - known).clamp(min=0)
        expected = torch.cat([before, reach[:, :-1]], dim=1) + 1
        raise_where(
            (reach > 1) & (reach != expected),
            f"{self.config.name} is a recurrence: it can start again at a position, but not forget older "
            "positions one by one, as a sliding window does",
            "starts that stay, or move to their own position",
            reach,
        )

    def extra_repr(self) -> str:
        names = (f.name for f in dataclasses.fields(self.config) if f.name not in ("init_std", "max_length"))
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in names)


def run_recurrence(
    recurrence: Callable[..., tuple[Tensor, Tensor]],
    *inputs: Tensor,
    state: DecodingState | None,
    visibility: Visibility,
) -> Tensor:
    """Continue a recurrence from the memory in ``state``, store its last memory there, return its outputs.

    Args:
        recurrence: a function of recurrence.py or scan.py, called with the ``inputs``, the memory (None for
            an empty one) and the reach of the new positions. It returns the outputs and the last memory.
    """
    out, memory = recurrence(*inputs, remembered(state, "memory"), visibility.reach)
    if state is not None:
        state["memory"] = memory
    return out
