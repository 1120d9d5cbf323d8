"""Checks of values that users pass. Each raises UserError with the value, what is allowed and what to do.

A dataclass of settings declares what a field may be beside the field, and calls ``check_fields``::

    rank: int = dataclasses.field(default=16, metadata=POSITIVE)
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from hypermlp.errors import UserError

Option = TypeVar("Option")
LARGEST_SIZE = 2**28
"""The largest size that a model or a benchmark may have: products of two fit in 64 bits, also in bytes."""


def require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}; it must be {allowed}")


class Rule(NamedTuple):
    """What a setting may be."""

    holds: Callable[[Any], bool]
    allowed: str
    """The rule in words; it follows "it must be" in messages."""


def rule(holds: Callable[[Any], bool], allowed: str) -> dict[str, Rule]:
    """Return the metadata of a dataclass field that must obey a rule."""
    return {"rule": Rule(holds, allowed)}


def rule_of(field: "dataclasses.Field[Any]") -> Rule | None:
    """Return the rule that a field was declared with."""
    found: Rule | None = field.metadata.get("rule")
    return found


def check_fields(settings: Any, prefix: str = "") -> None:
    """Raise unless all fields of a dataclass obey their rules.

    ``prefix`` stands before the name in the message, for example "training.".
    """
    for field in dataclasses.fields(settings):
        declared, value = rule_of(field), getattr(settings, field.name)
        if declared is not None:
            require(prefix + field.name, value, declared.holds(value), declared.allowed)


def near_miss(name: str, options: Iterable[str]) -> str:
    """Return a note such as ``" (did you mean 'rank'?)"`` for a misspelled option; empty if none is close."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def require_window(window: object, max_length: int) -> None:
    """Raise unless a sliding window is None or a number of positions that fits the context."""
    fits = window is None or (is_integer(window) and 0 < window <= max_length)  # type: ignore[operator]
    allowed = f"a positive integer, at most the context of {max_length} positions, or None"
    require("sliding_window", window, fits, allowed)


def is_integer(value: object) -> bool:
    """Return True for integers of Python and NumPy, but not for bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite int or float; a bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: int, most: float = math.inf) -> dict[str, Rule]:
    """Return the metadata of a field that is an integer between two bounds."""
    allowed = "a positive integer" if least == 1 else f"an integer, {least} or more"
    limit = "" if most == math.inf else f", at most {most:,}"
    return rule(lambda value: is_integer(value) and least <= value <= most, allowed + limit)


POSITIVE, NOT_NEGATIVE, SIZE = whole(1), whole(0), whole(1, LARGEST_SIZE)
FLAG = rule(lambda value: isinstance(value, bool), "True or False")
POSITIVE_NUMBER = rule(lambda value: is_number(value) and value > 0, "a positive finite number")
NOT_NEGATIVE_NUMBER = rule(lambda value: is_number(value) and value >= 0, "a finite number, 0 or more")


def one_of(*options: str) -> dict[str, Rule]:
    """Return the metadata of a field that has one of these values."""
    *first, last = map(repr, options)
    return rule(lambda value: value in options, f"{', '.join(first)} or {last}")


def optional(metadata: dict[str, Rule]) -> dict[str, Rule]:
    """Return the metadata of a field that may also be None."""
    declared = metadata["rule"]
    return rule(lambda value: value is None or declared.holds(value), f"{declared.allowed}, or None")


def find_option(what: str, name: object, options: Mapping[str, Option]) -> Option:
    """Return ``options[name]``; for an unknown name, raise an error that lists the allowed ones."""
    if not isinstance(name, str) or name not in options:
        note = near_miss(name, options) if isinstance(name, str) else ""
        raise UserError(f"unknown {what} {name!r}{note}; allowed: {', '.join(options)}")
    return options[name]
