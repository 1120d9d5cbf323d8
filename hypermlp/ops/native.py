"""Backend "native": the C++ kernels of csrc/, built and loaded on first use.

They register themselves with the operators that ops/library.py, layers/common.py and layers/step.py define.
docs/performance.md has the scheme and a picture of it.
"""

import ctypes
import functools

import torch

from hypermlp.ops import build
from hypermlp.ops.arguments import Request


@functools.cache
def load() -> None:
    """Load the kernels, built if need be. Raises BuildError with the reason."""
    path = build.build()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise build.BuildError(
            f"the kernels cannot be loaded: {error.__cause__ or error}; `hypermlp build --force` builds them "
            "anew"
        ) from error


def scratch_peak() -> int:
    """The most bytes of their own, beside PyTorch's, that the kernels held since this was last called.

    They start anew.
    """
    load()
    function = ctypes.CDLL(str(build.build())).hypermlp_scratch_peak
    function.restype = ctypes.c_int64
    return int(function())


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be used here; builds them when asked for the first time."""
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
