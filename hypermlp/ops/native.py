"""Backend "native": the C++ kernels of csrc/, built and loaded on first use.

The library registers its kernels with the operators ``hypermlp::native*``, which Python defines.
docs/performance.md has the scheme and a picture of it.
"""

import ctypes
import functools
from pathlib import Path

import torch

from hypermlp.ops import build


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
    """Return the peak of the kernels' scratch memory in bytes since the last call, and free that memory.

    PyTorch's allocator does not count this memory.
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


def unsupported(device_type: str, activation: str) -> str | None:
    """Return why the kernels cannot take such a call, or None."""
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if activation == "softmax":
        return "it has no softmax with mixes"
    return None
