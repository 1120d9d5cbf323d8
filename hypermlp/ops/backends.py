"""The table of backends: what each computes, where it is available, and the order in which "auto" tries them.

A new backend is one entry here; the contract's tests run over this table.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import blocked, native, reference
from hypermlp.ops.library import register_kernels

Run = Callable[..., Tensor]


def _always() -> None:
    return None


def _everything(device_type: str, activation: str) -> None:
    return None


@dataclass(frozen=True)
class Backend:
    """``unavailable`` and ``unsupported`` return None, or the reason why it cannot run here, or not on this."""

    name: str
    run: Run
    unavailable: Callable[[], str | None] = _always
    unsupported: Callable[[str, str], str | None] = _everything  # (device type, activation)


BACKENDS = {
    backend.name: backend
    for backend in (  # in the order of "auto"
        Backend("native", register_kernels("native"), native.unavailable, native.unsupported),
        Backend("blocked", register_kernels("blocked", blocked.forward, blocked.backward)),
        Backend("reference", reference.reference_attention),
    )
}


def available_backends() -> list[str]:
    """Names of the backends that can run on this machine, fastest first."""
    return [name for name, backend in BACKENDS.items() if backend.unavailable() is None]


def _names() -> str:
    return f"'auto', {', '.join(map(repr, BACKENDS))}"


def choose_backend(name: str, device_type: str, activation: str) -> str:
    """The name of the backend to use.

    An explicit name, or ``HYPERMLP_BACKEND`` in place of "auto", is used or refused with the reason. "auto" takes the first
    that can, and says once if one that should be there is not.
    """
    if not isinstance(name, str):
        raise UserError(f"backend is {name!r}; it must be a string: {_names()}")
    if name == "auto":
        name = os.environ.get("HYPERMLP_BACKEND") or "auto"
    if name == "auto":
        for backend in BACKENDS.values():
            if backend.unsupported(device_type, activation) is not None:
                continue
            reason = backend.unavailable()
            if reason is None:
                return backend.name
            _say_once(backend.name, reason)
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; allowed: {_names()}")
    reason = BACKENDS[name].unsupported(device_type, activation) or BACKENDS[name].unavailable()
    if reason is not None:
        raise UserError(
            f"backend {name!r} is not available: {reason}. Available here: 'auto', {', '.join(map(repr, available_backends()))}"
        )
    return name


# torch.compile calls it while tracing and keeps the answer. This is all that torch.compiler.assume_constant_result does,
# which would import the whole compiler.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _say_once(name: str, reason: str) -> None:
    warnings.warn(f"hypermlp: backend {name!r} passed over: {reason}", stacklevel=5)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within it, "auto" is this backend."""
    before = os.environ.get("HYPERMLP_BACKEND")
    os.environ["HYPERMLP_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["HYPERMLP_BACKEND"]
        if before is not None:
            os.environ["HYPERMLP_BACKEND"] = before
