"""Mixers for the benchmark: a label, a registered name, or a user's function, checked before any training."""

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.errors import UserError
from hypermlp.jobs.workers import describe
from hypermlp.layers import build_mixer
from hypermlp.mad.protocol import MadCell
from hypermlp.mad.tasks import find_task

MakeMixer = Callable[..., nn.Module]
CONTRACT = (
    "it must be a function make(hidden_size=..., max_length=...) that returns a causal module "
    "[B, T, D] -> [B, T, D]"
)


def make(mixer: str | MakeMixer, width: int, max_length: int) -> nn.Module:
    """Build the layer of a label, of a registered name, or of a user's function."""
    if isinstance(mixer, str):
        return build_mixer(mixer, hidden_size=width, max_length=max_length)
    return mixer(hidden_size=width, max_length=max_length)


def identify(name: str) -> str:
    """Return the name of a mixer in cells and records.

    A label stays as it is. "package.module:function" gets a digest of the module's source appended, so that
    an edited module makes new cells.
    """
    if ":" not in name:
        return name
    source = inspect.getsourcefile(inspect.getmodule(_load(name)) or sys.modules[name.partition(":")[0]])
    return f"{name}@{hashlib.sha256(Path(source).read_bytes()).hexdigest()[:8]}" if source else name


def resolve(name: str) -> str | MakeMixer:
    """Import the function that "package.module:function" names; return any other name unchanged."""
    return _load(name.partition("@")[0]) if ":" in name else name


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"mixer is {name!r}; allowed: a label such as G-cg-q-12o, or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the module may be a file in the current folder
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module can raise anything
        reason = str(error) if isinstance(error, ModuleNotFoundError) else describe(error)
        raise UserError(
            f"mixer {name!r} cannot be imported: {reason}; modules are found in the current folder, on "
            "PYTHONPATH and among installed packages"
        ) from error


def check_mixers(wanted: list[MadCell], mixer: str | MakeMixer | None = None) -> None:
    """Check every mixer at each width and length that occurs, so that mistakes surface before any training.

    ``mixer`` replaces the mixers that the cells name.
    """
    sizes = {
        (cell.mixer, cell.width, find_task(cell.task).settings(**cell.settings).seq_len) for cell in wanted
    }
    for name, width, length in sorted(sizes):
        check(name, mixer or resolve(name), width, length)


def check(name: str, mixer: str | MakeMixer, width: int, max_length: int) -> None:
    """Raise unless the mixer can be built; call a user's module to check its output and that it is causal."""
    if not isinstance(mixer, str):
        return _check_module(name, mixer, width, max_length)
    try:
        with torch.device("meta"):
            make(mixer, width, max_length)
    except ValueError as error:
        raise UserError(f"{error}; or package.module:function for a mixer of your own") from error


def _check_module(name: str, mixer: MakeMixer, width: int, max_length: int) -> None:
    x = torch.randn(2, max_length, width, generator=torch.Generator().manual_seed(0))
    half = max_length // 2
    changed = torch.cat([x[:, :half], -x[:, half:]], dim=1)
    try:
        made = make(mixer, width, max_length)
        if not isinstance(made, nn.Module):
            raise TypeError(f"it returned a {type(made).__name__}")
        with torch.no_grad():
            out, other = made.eval()(x), made(changed)
    except Exception as error:  # the user's code can raise anything
        raise UserError(f"mixer {name!r} fails: {describe(error)}; {CONTRACT}") from error
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        got = f"{list(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise UserError(
            f"mixer {name!r} returned {got} for an input {list(x.shape)} of {x.dtype}; "
            "it must return a tensor of the same shape and type"
        )
    if not out.isfinite().all():
        raise UserError(f"mixer {name!r} returned non-finite numbers for a normally distributed input")
    if not torch.allclose(out[:, :half], other[:, :half], rtol=1e-4, atol=1e-5):
        raise UserError(f"mixer {name!r} is not causal: an output depends on a later input; {CONTRACT}")
