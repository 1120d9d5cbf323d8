"""Interleaved timing and peak memory."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from hypermlp.ops.native import scratch_peak, unavailable

Work = Callable[[], object]
WARMUPS = 2


def interleaved_medians(
    works: Mapping[str, Work], *, rounds: int, seconds: float, device: str = "cpu"
) -> dict[str, float]:
    """Median seconds of each piece of work, timed in turn: what slows the machine slows them all.

    At most ``rounds`` rounds, fewer (but at least three) once ``seconds`` have gone by.
    """
    timed = _timed_on_gpu if device == "cuda" else _timed
    for _ in range(WARMUPS):
        for work in works.values():
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > seconds:
            break
        for name, work in works.items():
            times[name].append(timed(work))
    return {name: statistics.median(values) for name, values in times.items()}


def _timed(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _timed_on_gpu(work: Work) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Most memory held at once during ``work`` by PyTorch's allocator, beyond what it held before, and by our kernels."""
    work()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    native = unavailable() is None
    if native:
        scratch_peak()
    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    for _, change in sorted(
        (e.start_ns(), e.nbytes())
        for e in profiler.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ):
        held += change
        peak = max(peak, held)
    return peak + scratch_peak() if native else peak


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's own messages bypass Python, so the file descriptor is turned away."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def gemm_peak(size: int) -> Work:
    """A square matrix product to put among the timed works: ``2 * size ** 3`` FLOPs at the machine's best rate."""
    a, b, out = (torch.randn(size, size) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)
