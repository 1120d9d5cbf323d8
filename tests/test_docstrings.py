"""Every public name has a docstring, and the examples in these docstrings run by themselves."""

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "site"))
import stage

MODULES, OTHERS = stage.API, stage.OTHERS  # what the site's reference shows
WITHOUT_EXAMPLE = {
    "MixerState",
    "HyperMLPCacheLayer",
    "Task",
    "parameter_count",
    "forward_flops",
    "core_flops",
}


def public_objects() -> dict[str, object]:
    """Return the public classes and functions, and the modules that hold them, by their full names."""
    found: dict[str, object] = {}
    for name in (*MODULES, *OTHERS):
        module: ModuleType = importlib.import_module(name)
        found[name] = module
        for public in OTHERS.get(name, getattr(module, "__all__", [])):
            value = getattr(module, public)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{name}.{public}"] = value
    return found


def members(value: object) -> dict[str, object]:
    """Return the public methods and properties that a class of this package, or a base of it, defines."""
    found: dict[str, object] = {}
    for kind in inspect.getmro(value) if inspect.isclass(value) else ():
        if kind.__module__.startswith("hypermlp"):
            for name, member in vars(kind).items():
                described = inspect.isroutine(member) or isinstance(member, property)
                if described and not name.startswith("_"):
                    found.setdefault(name, member)
    return found


def examples(docstring: str) -> Iterator[str]:
    """Yield the code of every ``Example::`` block of a docstring."""
    for block in re.findall(r"^ *Example::\n\n((?:(?: {4,}.*)?\n)+)", docstring + "\n", re.M):
        yield textwrap.dedent(block)


PUBLIC = public_objects()
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value)]
CLASSES.remove("hypermlp.models.HyperMLPCacheLayer")  # its methods are those of transformers' cache layers
EXAMPLES = {
    f"{name}{suffix}": code
    for name, value in PUBLIC.items()
    for suffix, each in ({"": value} | {f".{key}": member for key, member in members(value).items()}).items()
    for code in examples(inspect.getdoc(each) or "")
}
# A method that several classes inherit has one example: run it once.
DISTINCT = {code: name for name, code in reversed(EXAMPLES.items())}


@pytest.mark.parametrize("code", DISTINCT, ids=DISTINCT.get)
def test_example_runs_alone(code):
    torch.manual_seed(0)
    names = {"__name__": "example"}
    exec(compile(f"{code}\nreached_the_end = True", "example", "exec"), names)
    assert names["reached_the_end"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented_with_an_example(name):
    own = vars(PUBLIC[name]).get("__doc__") if inspect.isclass(PUBLIC[name]) else PUBLIC[name].__doc__
    assert own, f"{name} has no docstring"
    if not inspect.ismodule(PUBLIC[name]) and name.rpartition(".")[2] not in WITHOUT_EXAMPLE:
        assert name in EXAMPLES, f"the docstring of {name} has no Example:: block"


@pytest.mark.parametrize("name", CLASSES)
def test_members_are_documented(name):
    assert [key for key, member in members(PUBLIC[name]).items() if not inspect.getdoc(member)] == []


def test_examples_are_found():
    text = "Do this.\n\nExample::\n\n    x = 1\n\n    assert x\n\nMore.\n\nExample::\n\n    y = 2\n"
    assert list(examples(text)) == ["x = 1\n\nassert x\n\n", "y = 2\n\n"]
