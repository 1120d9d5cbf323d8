"""What can be put into the benchmark: a label or registered name, or a function of the user's, checked before anything is trained."""

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

MakeMixer = Callable[..., nn.Module]
CONTRACT = "it must be a function make(hidden_size=..., max_length=...) that returns a causal module [B, T, D] -> [B, T, D]"


def make(mixer: str | MakeMixer, width: int, max_length: int) -> nn.Module:
    if isinstance(mixer, str):
        return build_mixer(mixer, hidden_size=width, max_length=max_length)
    return mixer(hidden_size=width, max_length=max_length)


def identify(name: str) -> str:
    """What cells and records know a mixer by: a label is itself, "package.module:function" also has a digest of the module's source."""
    if ":" not in name:
        return name
    source = inspect.getsourcefile(inspect.getmodule(_load(name)) or sys.modules[name.partition(":")[0]])
    return f"{name}@{hashlib.sha256(Path(source).read_bytes()).hexdigest()[:8]}" if source else name


def resolve(name: str) -> str | MakeMixer:
    """A label or registered name as it is; the function behind "package.module:function", with or without a digest."""
    return _load(name.partition("@")[0]) if ":" in name else name


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"mixer is {name!r}; allowed: a label such as G-cg-q-12o, or package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's file is
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise UserError(f"mixer {name!r} cannot be imported: {describe(error)}") from error


def check(name: str, mixer: str | MakeMixer, width: int, max_length: int) -> None:
    """Builds it, and a user's is tried: its shape, and that no position sees a later one."""
    if isinstance(mixer, str):
        try:
            with torch.device("meta"):
                make(mixer, width, max_length)
        except ValueError as error:
            raise UserError(f"{error}; or package.module:function for a mixer of your own") from error
        return
    x = torch.randn(2, max_length, width, generator=torch.Generator().manual_seed(0))
    half = max_length // 2
    later = torch.cat([x[:, :half], -x[:, half:]], dim=1)
    try:
        made = make(mixer, width, max_length)
        if not isinstance(made, nn.Module):
            raise TypeError(f"it made a {type(made).__name__}")
        with torch.no_grad():
            out, other = made.eval()(x), made(later)
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"mixer {name!r} fails: {describe(error)}; {CONTRACT}") from error
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        got = f"{list(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        wanted = f"{list(x.shape)} of {x.dtype}"
        raise UserError(
            f"mixer {name!r} gave {got} for an input {wanted}; it must give a tensor of the same shape and type"
        )
    if not out.isfinite().all():
        raise UserError(f"mixer {name!r} gave numbers that are not finite for a normal input")
    if not torch.allclose(out[:, :half], other[:, :half], rtol=1e-4, atol=1e-5):
        raise UserError(f"mixer {name!r} is not causal: a position changes with a later one; {CONTRACT}")
