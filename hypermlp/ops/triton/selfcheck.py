"""The self-check of the kernels on a GPU: a handful of cases against ``reference``, once per machine.

The kernels have been checked in Triton's interpreter and compiled for several GPUs, which shows neither the
rounding of matrix units nor a race. So before "auto" takes them on a device for the first time, a few cases
of the operator's contract run there, outputs and gradients, in at most about 30 seconds. The verdict is kept
in the folder ``checks`` of the cache, by device, driver, versions of PyTorch and Triton, and the kernels'
sources. If a case fails, "auto" takes ``blocked`` instead and warns once; ``backend="triton"`` still runs.

The check does not run while a CUDA graph is captured or a function is traced or compiled. A verdict that is
known already holds there. Without one, "auto" takes ``blocked`` and says so: call the layer once before it is
compiled, or run ``hypermlp info`` or ``hypermlp gpu-check`` first.
"""

import hashlib
import itertools
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hypermlp.cache import cache_directory

if TYPE_CHECKING:
    from hypermlp.ops.contract import Case

SECONDS = 20.0
"""No further case begins after so many seconds; one case takes a few, for compiling."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05}
TOLERANCE_TF32 = 0.01
SIZES = {"keys": 150, "heads": 2, "qk_dim": 16, "vo_dim": 32, "rank": 16}
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


_known: dict[str, Verdict] = {}


def distrusted() -> str | None:
    """Return why "auto" should not take the kernels on the current GPU; None if the check has passed.

    Runs the check if there is no verdict yet, unless something is being captured or traced.
    """
    known = _known.get(_key()) or _stored()
    if known is None and _recorded_now():
        return CHECK_FIRST
    verdict = known or self_check()
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
    for case, dtype in all_cases:
        if time.monotonic() - began > seconds:
            break
        detail = failure(case, dtype, device)
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


def failure(case: "Case", dtype: torch.dtype, device: str) -> str:
    """Run one case; return what is wrong with it, or nothing."""
    from hypermlp.ops.contract import check

    name = f"{case}, {dtype}".replace("torch.", "")
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
            check(case, "triton", dtype, device, tolerance=_tolerance(dtype), elements=False)
    except AssertionError as error:
        return f"{name}, {error}"
    except Exception as error:  # a compiler or driver error is a failure, too
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def cases(sizes: dict[str, int] = SIZES) -> list[tuple["Case", torch.dtype]]:
    """Return cases of the contract for all kernels, and their dtypes; the most important first."""
    from hypermlp.ops import contract

    dtypes = itertools.chain([torch.bfloat16] * 2, itertools.repeat(torch.float32))
    every = contract.cases(contract.VARIANTS[:3], **sizes)
    able = (case for case in every if case.runs_on("triton"))
    return list(zip(able, dtypes, strict=False))


def _tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return TOLERANCE_TF32
    return TOLERANCE[dtype]


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
