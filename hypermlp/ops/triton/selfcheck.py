"""The self-check of the kernels on a GPU: a handful of cases against ``reference``, once per machine.

The kernels have been checked in Triton's interpreter and compiled for several GPUs, which shows neither the
rounding of matrix units nor a race. So before "auto" takes them on a device for the first time, a few cases
of the operator's contract run there, outputs and gradients, in at most about 30 seconds. The verdict is kept
in the folder ``checks`` of the cache, by device, driver, versions of PyTorch and Triton, and the kernels'
sources. If a case fails, "auto" takes ``blocked`` instead and warns once; ``backend="triton"`` still runs.

The check does not run while a CUDA graph is captured or a function is traced or compiled. A verdict that is
known already holds there. Without one, "auto" takes ``blocked`` and says so: call the layer once before it is
compiled, or run ``hypermlp info`` or ``hypermlp gpu-check`` first. Under torch.distributed the first process
that asks decides for all of them.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.cache import cache_directory

SECONDS = 20.0
"""No further case begins after so many seconds; one case takes a few, for compiling."""
WAIT = 120.0
"""Seconds that a process waits for the verdict of another one."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
TOLERANCE_TF32 = 0.01
SIZES = {"queries": 150, "heads": 2, "qk_dim": 16, "vo_dim": 32, "rank": 16}
CHECK_FIRST = (
    "the kernels have not been checked on this GPU yet, which cannot be done while a function is compiled or "
    "a graph captured; call the layer once before that, or run `hypermlp info`"
)


class Verdict(NamedTuple):
    """The outcome of a check."""

    passed: bool
    detail: str
    """How many cases passed, or the first that failed and its error."""
    seconds: float

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'failed'}: {self.detail}"


class Case(NamedTuple):
    """One comparison: ``run`` takes a device and returns (name, actual, expected) for every result."""

    name: str
    run: Callable[[str], Iterator[tuple[str, Tensor, Tensor]]]
    tolerance: float


_known: dict[str, Verdict] = {}


def distrusted() -> str | None:
    """Return why "auto" should not take the kernels on the current GPU; None if the check has passed.

    Runs the check if there is no verdict yet, unless something is being captured or traced.
    """
    known = _known.get(_key()) or _stored()
    if known is None and _recorded_now():
        return CHECK_FIRST
    verdict = known or _shared(lambda: self_check())
    _known[_key()] = verdict
    if verdict.passed:
        return None
    name = torch.cuda.get_device_name()
    return f"the self-check on {name} failed ({verdict.detail}); please send us `hypermlp gpu-check`"


def outcome() -> str:
    """Return the verdict for the current GPU in words, without running the check."""
    if not torch.cuda.is_available():
        return "not run: there is no CUDA or ROCm device"
    verdict = _known.get(_key()) or _stored()
    return "not run yet" if verdict is None else str(verdict)


def self_check(
    device: str = "cuda", sizes: dict[str, int] = SIZES, seconds: float = SECONDS, store: bool = True
) -> Verdict:
    """Run the cases on a device, announce them, and return the verdict; ``store`` keeps it."""
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"hypermlp: checking the Triton kernels on {where}, once, up to 30 s", file=sys.stderr, flush=True)
    began = time.monotonic()
    detail, passed, done = "", True, 0
    all_cases = cases(sizes)
    for case in all_cases:
        if time.monotonic() - began > seconds:
            break
        detail = failure(case, device)
        if detail:
            passed = False
            break
        done += 1
    if passed:
        detail = f"{done} of {len(all_cases)} cases"
    verdict = Verdict(passed, detail, round(time.monotonic() - began, 1))
    print(f"hypermlp: {verdict} ({verdict.seconds} s)", file=sys.stderr, flush=True)
    if store:
        _store(verdict)
    return verdict


def failure(case: Case, device: str) -> str:
    """Run one case; return what is wrong with it, or nothing."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
            for name, actual, expected in case.run(device):
                error = _error(actual, expected)
                if not error <= case.tolerance:  # NaN is not
                    return f"{case.name}, {name}: relative error {error:.3g} exceeds {case.tolerance:.3g}"
    except Exception as error:  # a compiler or driver error is a failure, too
        return f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected magnitude; NaN if anything is not finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = expected.abs().max().clamp(min=1e-3)
    return float((actual - expected).abs().max() / largest)


def cases(sizes: dict[str, int] = SIZES) -> list[Case]:
    """Return the cases, the most important first."""
    found = []
    for dtype, activation, layout, pattern, queries in (
        (torch.bfloat16, "glu", "lag", "all", 0),
        (torch.bfloat16, "glu", "lag", "all", 1),
        (torch.float32, "glu", "lag", "packed", 0),
        (torch.float16, "glu", "lag", "window", 0),
        (torch.float32, "relu", "forward", "packed", 0),
        (torch.float32, "relu", "forward", "all", 1),
    ):
        what = f"{activation}, layout {layout}, {pattern}, {'decode' if queries else 'training'}"
        run = _operator_case(dtype, activation, layout, pattern, queries, sizes)
        found.append(Case(f"{what}, {dtype}".replace("torch.", ""), run, _tolerance(dtype)))
    found.insert(2, Case("convolution, float32", _convolution_case, _tolerance(torch.float32)))
    found.insert(3, Case("gates, float32", _gates_case, _tolerance(torch.float32)))
    return found


def _tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCE_TF32
    return TOLERANCE[dtype]


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator)


def _operator_case(
    dtype: torch.dtype, activation: str, layout: str, pattern: str, queries: int, sizes: dict[str, int]
) -> Callable[[str], Iterator[tuple[str, Tensor, Tensor]]]:
    def run(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        from hypermlp.ops.api import hyper_attention
        from hypermlp.ops.arguments import Mix

        keys, heads, rank = sizes["queries"], sizes["heads"], sizes["rank"]
        count, branches = queries or keys, heads * (2 if activation == "glu" else 1)

        def mix(number: int, seed: int) -> list[Tensor]:
            shapes = ((number, keys), (number, keys, rank), (number, keys, rank))
            parameters = [_normal(*shape, seed=seed + i, scale=0.2) for i, shape in enumerate(shapes)]
            return [*parameters, torch.sigmoid(_normal(2, count, number, rank, seed=seed + 3))]

        given = [
            _normal(2, count, branches, sizes["qk_dim"], seed=1, scale=sizes["qk_dim"] ** -0.5),
            _normal(2, keys, branches, sizes["qk_dim"], seed=2),
            _normal(2, keys, heads, sizes["vo_dim"], seed=3),
            *mix(branches, 10),
            *mix(heads, 20),
        ]
        position = torch.arange(keys - count, keys)
        starts = {
            "all": None,
            "packed": (position // 40 * 40).expand(2, -1),
            "window": (position - 60).clamp(min=0).expand(2, -1),
        }[pattern]
        results = []
        for backend in ("triton", "reference"):
            tensors = [x.to(device, dtype).requires_grad_() for x in given]
            q, k, v = tensors[:3]
            out = hyper_attention(
                q,
                k,
                v,
                Mix._make(tensors[3:7]),
                Mix._make(tensors[7:]),
                activation=activation,
                layout=layout,
                starts=None if starts is None else starts.to(device),
                backend=backend,
            )
            cotangent = _normal(*out.shape, seed=4).to(device, dtype)
            results.append([out, *torch.autograd.grad(out, tensors, cotangent)])
        names = ("output", "q", "k", "v", *(f"mix{i}.{field}" for i in (1, 2) for field in Mix._fields))
        yield from zip(names, *results, strict=True)

    return run


def _convolution_case(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    from hypermlp.ops.api import causal_conv

    given = [_normal(2, 33, 48, seed=1), _normal(48, 4, seed=2), _normal(48, 4, seed=3)]
    results = []
    for backend in ("triton", "reference"):
        tensors = [x.to(device).requires_grad_() for x in given]
        x, weight1, weight2 = tensors
        outs = causal_conv(x, (weight1, weight2), 30, backend=backend)
        results.append([*outs, *torch.autograd.grad(outs[0].sin().sum() + outs[1].cos().sum(), tensors)])
    yield from zip(("keys", "values", "x", "weight1", "weight2"), *results, strict=True)


def _gates_case(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    from hypermlp.ops.gating import triton_gating

    sizes = [24, 40, 8, 4]
    given = [_normal(2, 9, sum(sizes), seed=1), _normal(2, 9, sizes[0], seed=2)]

    def plain(logits: Tensor, q: Tensor, sizes: list[int]) -> list[Tensor]:
        first, *rest = F.sigmoid(logits).split(sizes, dim=-1)
        return [q * first, *rest]

    results = []
    for compute in (triton_gating.gate_queries, plain):
        tensors = [x.to(device).requires_grad_() for x in given]
        logits, q = tensors
        outs = compute(logits, q, sizes)
        total = torch.stack([out.sin().sum() for out in outs]).sum()
        results.append([*outs, *torch.autograd.grad(total, tensors)])
    yield from zip(("q", "output", "mix1", "mix2", "logits", "grad q"), *results, strict=True)


def _recorded_now() -> bool:
    """Return True while a CUDA graph is captured, or a function traced, compiled or transformed."""
    guards: Any = sys.modules.get("torch._guards")
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or (guards is not None and guards.TracingContext.try_get() is not None)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _shared(check: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of the first process that asks, for all processes of a torch.distributed group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return check()
    store = distributed.distributed_c10d._get_default_store()
    if store.add("hypermlp/triton-check", 1) == 1:
        verdict = check()
        store.set("hypermlp/triton-verdict", json.dumps(verdict))
        return verdict
    from datetime import timedelta

    try:
        store.wait(["hypermlp/triton-verdict"], timedelta(seconds=WAIT))
    except RuntimeError:
        return Verdict(False, f"no verdict of another process within {WAIT:g} s", WAIT)
    return Verdict(*json.loads(store.get("hypermlp/triton-verdict")))


def facts() -> dict[str, str]:
    """Return what a verdict depends on."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)() if torch.version.hip is None else 0
    return {
        "device": torch.cuda.get_device_name(),
        "driver": str(driver or torch.version.hip),
        "torch": torch.__version__,
        "triton": version("triton"),
        "sources": _sources(),
    }


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _key() -> str:
    return hashlib.sha256(json.dumps(facts()).encode()).hexdigest()[:16]


def _path() -> Path:
    return cache_directory() / "checks" / f"triton-{_key()}.json"


def _stored() -> Verdict | None:
    try:
        content = json.loads(_path().read_text())
        return Verdict(bool(content["passed"]), str(content["detail"]), float(content["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(verdict: Verdict) -> None:
    from hypermlp.files import write_text

    _known[_key()] = verdict
    try:
        write_text(_path(), json.dumps(verdict._asdict() | facts(), indent=2) + "\n")
    except OSError as error:
        print(f"hypermlp: the verdict could not be kept: {error}", file=sys.stderr)
