"""The keys of a recipe with their defaults and meanings, read from the source of ``recipe.py``."""

import ast
import dataclasses
import inspect
import json
import textwrap

from hypermlp.reporting.table import Table
from hypermlp.train.recipe import DataSettings, TrainingSettings
from hypermlp.validation import rule_of


def key_table() -> Table:
    """Return every key of the sections ``data`` and ``training``, with its default and its meaning."""
    sections = {"data": DataSettings, "training": TrainingSettings}
    rows = [
        [f"{section}.{field.name}", _default(field), meanings[field.name] + _allowed(field)]
        for section, settings in sections.items()
        for meanings in [_meanings(settings)]
        for field in dataclasses.fields(settings)
    ]
    return Table(["key", "default", "meaning"], rows, left=frozenset({"default", "meaning"}))


def key_help() -> str:
    """Return the same as text for a terminal."""
    entries = [
        f"{key} = {default}\n{textwrap.fill(meaning, 100, initial_indent='    ', subsequent_indent='    ')}"
        for key, default, meaning in key_table().rows
    ]
    model = (
        "model.match_parameters = null\n    a mixer: choose the width of the MLP so that the model has as "
        "many parameters as with that mixer\n"
        "model.*\n    the fields of HyperMLPConfig: python -m pydoc hypermlp.models.HyperMLPConfig"
    )
    return "\n".join([*entries, model])


def _default(field: dataclasses.Field[object]) -> str:
    """Return the default of a field as YAML; "required" if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "required"
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def _allowed(field: dataclasses.Field[object]) -> str:
    """Return a sentence about the values that a field may have; empty if its type says all."""
    declared = rule_of(field)
    return f" It must be {declared.allowed}." if declared is not None else ""


def _meanings(settings: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    (definition,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
