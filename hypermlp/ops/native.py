"""Backend "native": the C++ kernels of csrc/, loaded on first use, and built then unless they were shipped.

The library registers its kernels with the operators ``hypermlp::native*``, which Python defines.
docs/performance.md has the scheme and a picture of it.
"""

import ctypes
import functools
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import build, shipped
from hypermlp.ops.arguments import Attention, Request


@functools.cache
def load() -> Path:
    """Load the kernels and return the library's path. Raise BuildError on failure.

    Libraries of the wheel are preferred. Warn about one that does not pass its self-test, and try the next
    one; if there is none left, build the kernels.
    """
    _check_scratch_limit()
    for library in shipped.usable():
        try:
            _register(library.path)
            problem = shipped.self_test()
        except (OSError, RuntimeError) as error:
            problem = str(error)
        if problem is None:
            return library.path
        warnings.warn(f"hypermlp: {library.file} of this installation fails: {problem}", stacklevel=2)
    path = build.build()
    try:
        _register(path)
    except OSError as error:
        raise build.BuildError(
            f"the kernels cannot be loaded: {error.__cause__ or error}; "
            "run `hypermlp build --force` to build them again"
        ) from error
    return path


def _register(path: Path) -> None:
    """Load a library, whose kernels replace those of a library that failed its self-test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*registered kernel")
        torch.ops.load_library(str(path))


def origin() -> str:
    """Return the instruction set of the kernels and where the library is.

    Raises:
        BuildError: if there are none.
    """
    path = load()
    found = next((library for library in shipped.usable() if library.path == path), None)
    if found is not None:
        return f"{found.instruction_set}, from the wheel: {path}"
    return f"{build.THIS_PROCESSOR}, built on this machine: {path}"


def kept_rows(arguments: Attention) -> Tensor:
    """Return an empty tensor for what the forward keeps of every row, ``[B, Tq, H, width]``.

    It is 1/rho, then the product of the scores of each branch with ``left`` of the first mix, then that of
    the activation with ``right`` of the second.
    """
    q, heads = arguments.q, arguments.v.shape[2]
    width = 1
    if arguments.mix1 is not None:
        width += q.shape[2] // heads * arguments.mix1.left.shape[2]
    if arguments.mix2 is not None:
        width += arguments.mix2.right.shape[2]
    return q.new_empty(*q.shape[:2], heads, width, dtype=torch.promote_types(q.dtype, torch.float32))


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
    operator, up to HYPERMLP_SCRATCH_MB; after this call it frees that memory when it next runs a kernel.
    PyTorch's allocator does not count it.

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
    if request.operation == "layer" and request.dtype not in (torch.float32, torch.float64):
        return f"it computes a whole layer in float32 and float64, not in {request.dtype}"
    return None
