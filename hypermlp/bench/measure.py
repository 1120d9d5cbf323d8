"""Interleaved timing and peak memory."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hypermlp.costs.profiler import quiet_profile
from hypermlp.ops.native import scratch_peak, unavailable

Work = Callable[[], object]
Row = dict[str, Any]  # one measurement, as it is recorded
WARMUPS = 2


def interleaved_medians(
    works: Mapping[str, Work], *, rounds: int, seconds: float, device: str = "cpu"
) -> dict[str, float]:
    """Return the median seconds of each work, as ``interleaved_times`` measures them."""
    times = interleaved_times(works, rounds=rounds, seconds=seconds, device=device)
    return {name: statistics.median(values) for name, values in times.items()}


def interleaved_times(
    works: Mapping[str, Work], *, rounds: int, seconds: float, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return the seconds of each work in every round.

    Every round runs all works in turn, so that whatever slows the machine down slows all of them. There are
    at most ``rounds`` rounds, and no further one (after the third) once ``seconds`` have passed.
    """
    timed = _timed_on_gpu if device == "cuda" else _timed
    for work in [*works.values()] * WARMUPS:
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - began > seconds:
            break
        for name, work in works.items():
            times[name].append(timed(work))
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of a single value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third


def with_quartiles(ratio: float, quarters: Sequence[float] | None) -> str:
    """Return the text of a ratio with its quartiles, which ratios of memory and older records do not have."""
    return f"{ratio:.2f} ({quarters[0]:.2f} to {quarters[1]:.2f})" if quarters else f"{ratio:.2f}"


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
    """Return the peak memory that ``work`` adds: PyTorch's allocations and our kernels' scratch buffers."""
    work()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    scratch = scratch_peak if unavailable() is None else lambda: 0
    scratch()  # begins a new peak
    with quiet_profile(profile_memory=True) as profiler:
        work()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate((change for _, change in changes), initial=0)) + scratch()


def forward_pass(model: Any, tokens: Tensor) -> Work:
    """Return a forward pass of a language model, without gradients and without a cache."""
    return torch.no_grad()(partial(model, tokens, use_cache=False))


def random_tokens(vocab_size: int, *shape: int) -> Tensor:
    """Return random tokens, the same at every call."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
