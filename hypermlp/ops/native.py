"""Backend "native": the C++ kernels of csrc/, built and loaded on first use.

The library registers its kernels with the operators ``hypermlp::native*``, which Python defines.
docs/performance.md has the scheme and a picture of it.
"""

import ctypes
import functools
import os
from pathlib import Path

import torch

from hypermlp.errors import UserError
from hypermlp.ops import build
from hypermlp.ops.arguments import Request


@functools.cache
def load() -> Path:
    """Build the kernels if need be, load them and return the library's path. Raise BuildError on failure."""
    _check_scratch_limit()
    path = build.build()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise build.BuildError(
            f"the kernels cannot be loaded: {error.__cause__ or error}; "
            "run `hypermlp build --force` to build them again"
        ) from error
    return path


def _check_scratch_limit() -> None:
    """Raise UserError unless HYPERMLP_SCRATCH_MB is absent or a number that the library can read."""
    text = os.environ.get("HYPERMLP_SCRATCH_MB", "0")
    if not text.isascii() or not text.isdigit():
        raise UserError(
            f"HYPERMLP_SCRATCH_MB is {text!r}; it must be a whole number of MiB, 0 or more, such as 16"
        )


def scratch_peak() -> int:
    """Return the peak of the CPU kernels' scratch memory in bytes since the last call, and reset it.

    The number is the sum over all threads. Each thread keeps its scratch memory between calls of the
    operator; after this call it frees that memory when it next runs a kernel. PyTorch's allocator does not
    count it.

    Raises:
        BuildError: if the kernels of backend "native" cannot be built or loaded.

    Example::

        from hypermlp.ops import available_backends
        from hypermlp.ops.native import scratch_peak

        if "native" in available_backends():
            print(scratch_peak(), "bytes")
    """
    function = ctypes.CDLL(str(load())).hypermlp_scratch_peak
    function.restype = ctypes.c_int64
    return int(function())


def backward_tasks(batch: int, heads: int, queries: int, keys: int) -> int:
    """Return how many tasks the backward kernel can run at the same time for a shape without starts."""
    function = ctypes.CDLL(str(load())).hypermlp_backward_tasks
    function.argtypes = [ctypes.c_int64] * 4
    function.restype = ctypes.c_int64
    return int(function(batch, heads, queries, keys))


@functools.cache
def unavailable() -> str | None:
    """Return why the kernels cannot be used here, or None. The first call builds them."""
    try:
        load()
    except build.BuildError as error:
        return str(error)
    return None


def unsupported(request: Request) -> str | None:
    """Return why the kernels cannot serve a request; None if they can."""
    if request.device_type != "cpu":
        return f"it runs on the CPU, not on {request.device_type}"
    if request.activation == "softmax":
        return "it has no softmax"
    return None
