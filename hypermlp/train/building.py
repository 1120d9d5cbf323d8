"""Build the dataclasses of a recipe from the content of its YAML file."""

import contextlib
import dataclasses
import types
import typing
from typing import Any, Literal

from hypermlp.errors import UserError
from hypermlp.validation import near_miss, require

KINDS = {  # types in messages
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}


def build(cls: type, content: dict[str, Any], where: str) -> Any:
    """Build a dataclass from a dictionary, checking keys and types; messages put ``where`` before keys."""
    hints = typing.get_type_hints(cls)
    for key in content:
        if key not in hints:
            note = near_miss(str(key), hints)
            allowed = ", ".join(where + name for name in hints)
            raise UserError(f"unknown recipe key {where + str(key)!r}{note}; allowed: {allowed}")
    for each in dataclasses.fields(cls):
        optional = {each.default, each.default_factory} != {dataclasses.MISSING}
        if not optional and each.name not in content:
            raise UserError(
                f"the recipe has no {where}{each.name}, which it must give; "
                "`hypermlp train --keys` lists all keys"
            )
    return cls(**{key: typed(value, hints[key], where + key) for key, value in content.items()})


def typed(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` if it has the type ``hint``, converted where YAML's type differs; raise otherwise."""
    if dataclasses.is_dataclass(hint):
        require(where, value, isinstance(value, dict), "a mapping")
        return build(typing.cast(type, hint), value, where + ".")
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, Literal) else (hint,)
    if float in options and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 6e-4 as a string
    if any(_matches(value, option) for option in options):
        return value
    names = (KINDS.get(each) or getattr(each, "__name__", repr(each)) for each in options)
    raise UserError(f"{where} is {value!r}; it must be {' or '.join(names)}")


def _matches(value: Any, option: Any) -> bool:
    """Return whether a value has the type ``option``, such as int or list[str], or is that string."""
    if isinstance(option, str):
        return bool(value == option)
    plain = typing.get_origin(option) or option
    return isinstance(value, plain) and not (plain is int and isinstance(value, bool))
