"""Backend "native": the C++ kernels of csrc/, built and loaded on first use.

The library registers its kernels with the operators ``hypermlp::native*``, which Python defines.
docs/performance.md has the scheme and a picture of it.
"""

import ctypes
import functools
from pathlib import Path

import torch

from hypermlp.ops import build
from hypermlp.ops.arguments import Request


@functools.cache
def load() -> Path:
    """Build the kernels if need be, load them and return the library's path. Raise BuildError on failure."""
    path = build.build()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise build.BuildError(
            f"the kernels cannot be loaded: {error.__cause__ or error}; "
            "run `hypermlp build --force` to build them again"
        ) from error
    return path


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
    if request.operation == "step" and request.dtype not in (torch.float32, torch.float64):
        return f"its one-step kernel takes float32 and float64, not {request.dtype}"
    return None
