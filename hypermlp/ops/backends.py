"""The table of backends: what each computes, where it is available, and the order in which "auto" tries them.

A new backend is one entry here; the contract's tests run over this table.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hypermlp.ops import blocked, reference
from hypermlp.ops.library import register_kernels

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Backend:
    """``unavailable`` and ``unsupported`` return None, or the reason why it cannot run here, or not on these tensors."""

    name: str
    run: Run
    unavailable: Callable[[], str | None] = lambda: None
    unsupported: Callable[[Tensor], str | None] = lambda q: None


BACKENDS = {
    backend.name: backend
    for backend in (  # in the order of "auto"
        Backend("blocked", register_kernels("blocked", blocked.forward, blocked.backward)),
        Backend("reference", reference.reference_attention),
    )
}


def available_backends() -> list[str]:
    """Names of the backends that can run on this machine, fastest first."""
    return [name for name, backend in BACKENDS.items() if backend.unavailable() is None]


def choose_backend(name: str, q: Tensor) -> Backend:
    """An explicit name is used or refused with the reason; "auto" takes the first that can, and says once what it passed over."""
    if not isinstance(name, str):
        raise ValueError(f"backend is {name!r}; it must be a string: 'auto', {', '.join(map(repr, BACKENDS))}")
    if name == "auto":
        for backend in BACKENDS.values():
            reason = backend.unavailable() or backend.unsupported(q)
            if reason is None:
                return backend
            _say_once(backend.name, reason)
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; allowed: 'auto', {', '.join(map(repr, BACKENDS))}")
    backend = BACKENDS[name]
    reason = backend.unavailable() or backend.unsupported(q)
    if reason is not None:
        raise ValueError(
            f"backend {name!r} is not available: {reason}. Available here: 'auto', {', '.join(map(repr, available_backends()))}"
        )
    return backend


@functools.cache
def _say_once(name: str, reason: str) -> None:
    warnings.warn(f"hypermlp: backend {name!r} passed over: {reason}", stacklevel=5)
