"""The table of backends and the choice among them.

A ``Request`` describes what is to be computed; a backend answers with "yes" (None) or the reason why not. A
new backend is one entry in ``BACKENDS``; the contract's tests run over this table.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import blocked, convolution, gating, native, reference, ring, sdpa, triton
from hypermlp.ops.arguments import Attention, Request
from hypermlp.ops.convolution import Convolution
from hypermlp.ops.gating import Gating
from hypermlp.ops.layer import (
    LayerArguments,
    RingStepArguments,
    StepArguments,
    native_layer,
    native_step,
    triton_step,
)
from hypermlp.ops.library import register_attention


@dataclass(frozen=True)
class Backend:
    """One implementation of some operations.

    ``unavailable()`` returns why the backend cannot run on this machine, ``unsupported(request)`` why it
    cannot serve a request; both return None if it can. ``unsupported`` is asked first and must be cheap:
    ``unavailable`` may build kernels.
    """

    name: str
    attention: Callable[[Attention], Tensor]
    convolution: Convolution | None = None
    ring: Callable[[Attention, Tensor], Tensor] | None = None
    """The operator over a ring, for queries at positions on the device (ops/ring.py)."""
    gating: Gating | None = None
    """The sigmoid gates of a layer in fused kernels; without them a layer runs plain PyTorch."""
    layer: Callable[[LayerArguments], Tensor] | None = None
    """A whole layer without a state as one operator."""
    step: Callable[[StepArguments], Tensor] | None = None
    """A layer's decoding step as one operator."""
    ring_step: Callable[[RingStepArguments], Tensor] | None = None
    """A layer's decoding step on a state of fixed size as one operator."""
    skips: Callable[[Request], bool] = lambda request: True
    """Whether it skips keys that ``starts`` hides from a whole block of queries, or is too slow for it to
    matter. If not, a sliding window is cut into chunks first."""
    unavailable: Callable[[], str | None] = lambda: None
    unsupported: Callable[[Request], str | None] = lambda request: None
    automatic: Callable[[Request], bool] = lambda request: True
    """Whether "auto" may take it for a request that it supports."""
    distrusted: Callable[[], str | None] = lambda: None
    """Why "auto" should not take it although it can run; may run a check. None if there is no reason."""

    def lacks(self, operation: str) -> bool:
        return operation != "attention" and not getattr(self, operation)

    def refusal(self, request: Request) -> str | None:
        """Return why this backend cannot serve the request, apart from the machine; None if it can."""
        if self.lacks(request.operation):
            return f"it has no {request.operation}"
        return self.unsupported(request)


BACKENDS = {
    backend.name: backend
    for backend in (  # in the order in which "auto" tries them
        Backend(
            "native",
            register_attention("native", kept=native.kept_rows),
            convolution.native_conv,
            layer=native_layer,
            step=native_step,
            unavailable=native.unavailable,
            unsupported=native.unsupported,
        ),
        Backend("sdpa", sdpa.attention, unsupported=sdpa.unsupported, skips=lambda request: False),
        Backend(
            "triton",
            register_attention(
                "triton", triton.forward, triton.backward, kept=triton.empty_sums, keeps_output=True
            ),
            convolution.triton_conv,
            ring=ring.triton_attention,
            gating=gating.triton_gating,
            ring_step=triton_step,
            unavailable=triton.unavailable,
            unsupported=triton.unsupported,
            automatic=lambda request: request.device_type == "cuda",
            distrusted=triton.distrusted,
            skips=lambda request: False,  # the host does not read starts
        ),
        Backend(
            "blocked",
            register_attention("blocked", blocked.forward, blocked.backward),
            convolution.blocked_conv,
            skips=lambda request: request.device_type == "cpu",  # elsewhere the host does not read starts
        ),
        Backend("reference", reference.attention, convolution.reference_conv, ring=ring.attention),
    )
}
_override = ""  # what "auto" stands for inside ``use_backend``; torch.compile guards on it


def available_backends() -> list[str]:
    """Return the names of the backends that can run on this machine, in the order in which "auto" tries them.

    "native" has C++ kernels for the CPU (relu and glu). Unless the wheel contains them, they need a C++
    compiler and are built once, by the first call of this function or of the operator that wants them, which
    takes about half a minute; later processes find them in the cache. "triton" has kernels for GPUs (relu and
    glu); with TRITON_INTERPRET=1 in the environment it runs on the CPU, slowly. "sdpa" is PyTorch's fused
    attention: softmax without mixes. "blocked" runs anywhere, in memory linear in the length. "reference" is
    the definition: it runs anywhere, and is the only one with second derivatives.

    Example::

        from hypermlp.ops import available_backends

        assert "reference" in available_backends()
    """
    return [name for name, backend in BACKENDS.items() if backend.unavailable() is None]


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make "auto" stand for the backend ``name`` inside a ``with`` block.

    Calls and layers that name a backend themselves are not affected. Compiled functions are compiled again
    for it. If the backend is unknown or cannot run, the calls inside the block raise UserError.

    Example::

        import torch
        from hypermlp import HyperGLU
        from hypermlp.ops.dispatch import use_backend

        layer, x = HyperGLU(64, max_length=128), torch.randn(1, 20, 64)
        with use_backend("reference"):
            y = layer(x)
    """
    global _override
    before, _override = _override, name
    try:
        yield
    finally:
        _override = before


def choose_backend(name: str, request: Request, *, required: bool = True) -> Backend:
    """Return the backend to use for a request.

    An explicit name (or the one of ``use_backend``, or ``HYPERMLP_BACKEND``, in place of "auto") is used, or
    refused with the reason. "auto" takes the first backend that can serve the request, and warns once about
    one that should be able to but is not available on this machine.

    Args:
        required: whether a named backend that does not have the operation at all, such as "sdpa" for a
            convolution, is refused. A layer, whose backend names that of its attention, leaves other
            operations to "auto" then.
    """
    return BACKENDS[_choose(_stands_for(name), required, *request)]


def find_backend(name: str, request: Request) -> Backend | None:
    """Return the backend for an operation that plain PyTorch computes otherwise; None if there is none."""
    found = _find(_stands_for(name), *request)
    return BACKENDS[found] if found else None


def _stands_for(name: str) -> str:
    """Return the backend that ``use_backend`` or the environment puts in the place of "auto"."""
    return (_override or _environment()) if name == "auto" else name


def _environment() -> str:
    return os.environ.get("HYPERMLP_BACKEND") or "auto"


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, ["auto", *names]))


def _choose(name: str, required: bool, *fields: Any) -> str:
    """Return the name of the backend.

    torch.compile passes constants only, so the request comes as its fields.
    """
    request = Request(*fields)
    if not isinstance(name, str):
        raise UserError(f"backend is {name!r}; it must be a string: {_names(list(BACKENDS))}")
    if not required and name in BACKENDS and BACKENDS[name].lacks(request.operation):
        name = "auto"
    if name == "auto":
        if found := _first(request):
            return found
        raise UserError(f"no backend can serve {request}; available here: {_names(available_backends())}")
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; allowed: {_names(list(BACKENDS))}")
    reason = BACKENDS[name].refusal(request) or BACKENDS[name].unavailable()
    if reason is not None:
        able = [other for other in available_backends() if BACKENDS[other].refusal(request) is None]
        raise UserError(f"backend {name!r} is not available: {reason}. Available here: {_names(able)}")
    return name


def _first(request: Request) -> str:
    """Return the name of the first backend that "auto" may take for the request, "" for none."""
    for backend in BACKENDS.values():
        if backend.automatic(request) and backend.refusal(request) is None:
            reason = backend.unavailable() or backend.distrusted()
            if reason is None:
                return backend.name
            _warn_once(backend.name, reason)
    return ""


def _find(name: str, *fields: Any) -> str:
    """Return the name of the backend, "" if none can serve the request."""
    request = Request(*fields)
    if name == "auto":
        return _first(request)
    backend = BACKENDS.get(name)
    able = backend is not None and backend.refusal(request) is None and backend.unavailable() is None
    return name if able else ""


# torch.compile calls these while tracing and keeps the answers. Setting the attribute is all that
# torch.compiler.assume_constant_result does, and importing that would import the whole compiler.
for _function in (_environment, _choose, _find):
    vars(_function)["_dynamo_marked_constant"] = True


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warnings.warn(f"hypermlp: backend {name!r} is not available: {reason}", stacklevel=6)
