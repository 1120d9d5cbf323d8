"""Libraries of the CPU kernels that a wheel contains, one for each instruction set.

``hatch_build.py`` compiles them and writes the manifest. The best library that the processor can run is used,
unless the user asks for a build on this machine by setting ``CXX`` or ``HYPERMLP_CXXFLAGS``. Before its first
use in a process, a library must pass the cases of the contract (contract.py) on small inputs.
"""

import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hypermlp.errors import UserError
from hypermlp.ops import build

FOLDER = Path(__file__).parent / "lib"
MANIFEST = "manifest.json"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
SIZES = {"keys": 21, "heads": 2, "qk_dim": 5, "vo_dim": 7, "rank": 3}


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
    from hypermlp.ops import contract  # imports the table of backends, which imports this module

    for case in contract.cases(contract.VARIANTS[:3], **SIZES):
        for dtype, tolerance in TOLERANCE.items():
            if case.refusal("native", dtype) is None:
                try:
                    contract.check(case, "native", dtype, tolerance=tolerance)
                except AssertionError as error:
                    return f"{case}, {dtype}: {error}"
    return None
