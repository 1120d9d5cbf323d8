"""What all fuzzers share: a part, a finding, and the environment of their processes."""

import contextlib
import ctypes
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis.strategies import SearchStrategy

Case = dict[str, Any]
"""A case holds what JSON can hold, so that a finding can be written to a file and replayed."""
Check = Callable[[Case], Counter[str]]
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}


class Finding(Exception):
    """A promise that a case broke. ``kind`` is equal for findings with the same cause, as far as known."""

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind, self.message = kind, message


class Part:
    """One fuzzer. A subclass sets ``name``, ``cases`` and ``share``, and writes ``check``."""

    name: str
    cases: Callable[[], SearchStrategy[Case]]
    """Return the strategy that draws cases; Hypothesis reduces the one that fails."""
    share: int
    """Its part of the time; a run of some parts divides the time among those."""
    enough: int | None = None
    """Cases after which it leaves the rest of its time to the next part, in a run of up to two hours."""
    limit = 120.0
    """Seconds after which a case counts as a hang."""
    environment: ClassVar[dict[str, str]] = {}
    """Variables that its process needs."""

    def __init__(self, folder: Path):
        self.folder = folder
        """A folder for temporary files."""

    def check(self, case: Case) -> Counter[str]:
        """Raise Finding if the case breaks a promise; return what was counted, such as comparisons.

        A key that begins with "worst " holds a number of which the largest is kept.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what the part started."""


def failure(check: Check, case: Case) -> Finding | Counter[str]:
    """Return what a case finds, else what was counted; an unexpected exception is a finding too."""
    try:
        return check(case)
    except Finding as finding:
        return finding
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
        text = "".join(traceback.format_exception(error))
        return Finding(f"{type(error).__name__} in {place}", text[-3000:])


def die_with_parent() -> None:
    """End this process when its parent ends, even if the parent was killed (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
