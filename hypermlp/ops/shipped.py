"""Libraries of the CPU kernels that a wheel contains, one for each instruction set.

``hatch_build.py`` compiles them and writes the manifest. The best library that the processor can run is used,
unless the user asks for a build on this machine by setting ``CXX`` or ``HYPERMLP_CXXFLAGS``. Before its first
use in a process, a library must agree with ``reference`` on small inputs.
"""

import json
import math
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.ops import build, reference
from hypermlp.ops.arguments import Attention, Mix

FOLDER = Path(__file__).parent / "lib"
MANIFEST = "manifest.json"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass(frozen=True)
class Library:
    """One library of the wheel."""

    file: str
    instruction_set: str
    """Such as "avx2"; ``HYPERMLP_ISA`` takes these names."""
    needs: tuple[str, ...]
    """The processor's flags, as /proc/cpuinfo names them, without which the library cannot run."""
    sha256: str

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    def is_whole(self) -> bool:
        """Return whether the file is what the wheel contained."""
        try:
            return build.digest(self.path.read_bytes()) == self.sha256
        except OSError:
            return False


def find() -> Library | None:
    """Return the best of the ``usable`` libraries, or None if the kernels must be built on this machine."""
    return next(usable(), None)


def usable() -> Iterator[Library]:
    """Yield the whole libraries that this processor can run, best first; warn about damaged ones.

    There are none if the user asks for a build on this machine. Raise UserError if ``HYPERMLP_ISA`` names an
    instruction set that is not in the wheel, or that this processor does not have.
    """
    wanted = os.environ.get("HYPERMLP_ISA", "")
    if os.environ.get("CXX") or build.extra_flags():
        return
    libraries = _libraries()
    if wanted and wanted not in [library.instruction_set for library in libraries]:
        names = ", ".join(library.instruction_set for library in libraries) or "none: it has no kernels"
        raise UserError(f"HYPERMLP_ISA is {wanted!r}; this installation has {names}")
    features = _features()
    for library in libraries:
        missing = [need for need in library.needs if need not in features]
        if wanted == library.instruction_set and missing:
            raise UserError(f"HYPERMLP_ISA is {wanted!r}, but this processor lacks {', '.join(missing)}")
        if wanted in ("", library.instruction_set) and not missing:
            if library.is_whole():
                yield library
            else:
                _warn(f"{library.path} is missing or damaged; install the package again")


def self_test() -> str | None:
    """Compare the loaded kernels with ``reference``; return what differs, or None.

    It runs on a thread of its own, where no mode of the caller, such as tracing or autocast, is active.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compare).result()


def _libraries() -> list[Library]:
    """Return the libraries of this installation, best first; none if the sources were changed."""
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text())
        sources = manifest["sources"]
        libraries = [
            Library(**fields | {"needs": tuple(fields["needs"])}) for fields in manifest["libraries"]
        ]
    except FileNotFoundError:
        return []  # the package was not installed from a wheel with kernels
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(f"{FOLDER / MANIFEST} cannot be read ({error!r}); install the package again")
        return []
    if sources != build.source_digest():
        _warn(f"the sources in {build.SOURCES} are not those of the kernels in {FOLDER}, which are not used")
        return []
    return libraries


def _warn(message: str) -> None:
    warnings.warn(f"hypermlp: {message}", stacklevel=2)


def _features() -> set[str]:
    """Return the processor's flags; none where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def _compare() -> str | None:
    for dtype, tolerance in TOLERANCE.items():
        for activation, layout in (("relu", "lag"), ("glu", "forward")):
            for queries in (2, 21):  # the kernels for a few and for many queries
                arguments = _arguments(dtype, activation, layout, queries)
                error = max(map(_difference, *_results(arguments)))
                if not error <= tolerance:
                    return f"{activation}, {layout}, {dtype}: error {error:.1e}, allowed {tolerance:.0e}"
    return None


def _results(arguments: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """Return the output and the gradients of the kernels, and those of ``reference``."""
    flat = arguments.flatten()
    out, kept = torch.ops.hypermlp.native(*flat)
    grad_out = _waves(out.shape, out.dtype, 0.9)
    grads = torch.ops.hypermlp.native_gradients([grad_out], [kept], *flat)
    given = [x.requires_grad_() for x in arguments.tensors() if x is not None]
    expected = reference.attention(arguments)
    expected_grads = torch.autograd.grad(expected, given, grad_out)
    return [out, *grads], [expected.detach(), *expected_grads]


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; NaN counts as infinite."""
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


def _arguments(dtype: torch.dtype, activation: str, layout: str, queries: int) -> Attention:
    batch, keys, heads, rank = 2, 21, 2, 3
    branches = 2 * heads if activation == "glu" else heads

    def mix(count: int, step: float) -> Mix:
        left, right = (_waves((count, keys, rank), dtype, step + i) for i in (1, 2))
        gate = torch.sigmoid(_waves((batch, queries, count, rank), dtype, step + 3))
        return Mix(_waves((count, keys), dtype, step), left, right, gate)

    return Attention(
        _waves((batch, queries, branches, 5), dtype, 0.7),
        _waves((batch, keys, branches, 5), dtype, 1.3),
        _waves((batch, keys, heads, 7), dtype, 1.9),
        mix(branches, 0.4),
        mix(heads, 0.6),
        None,
        activation,
        layout,
        1e-12,
    )


def _waves(shape: tuple[int, ...], dtype: torch.dtype, step: float) -> Tensor:
    """Return numbers without a pattern; the random state of the program must not change."""
    count = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return torch.sin(step * count + 0.01 * count * count).to(dtype).reshape(shape)
