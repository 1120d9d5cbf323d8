"""What all fuzzers share: a part, a finding, the search for a smaller case, and the loop over cases.

A case is a small dict that JSON can hold. It is a pure function of (seed, part, index), so the index of a
case that ended its process is enough to draw it again.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]
TESTS = Path(__file__).parents[1]
SHRINK_TRIES = 150
SHRINK_SECONDS = 60.0
KEPT = 3
"""Reproductions that are written for one kind of finding; the others are counted."""


def environment(part: str = "") -> dict[str, str]:
    """Return the environment of a part's processes: they find this tree, share the cores, and are offline."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    return os.environ | fixed | ({"TRITON_INTERPRET": "1"} if part == "triton" else {})


class Finding(Exception):
    """A promise that a case broke. ``kind`` is equal for findings with the same cause, as far as known."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class Part:
    """One fuzzer. A subclass writes ``draw``, ``check`` and ``smaller``."""

    name: str
    limit = 120.0
    """Seconds after which a case counts as a hang."""

    def __init__(self, folder: Path):
        self.folder = folder
        """A folder for temporary files."""

    def draw(self, rng: random.Random) -> Case:
        """Return a random case."""
        raise NotImplementedError

    def check(self, case: Case) -> Counter[str]:
        """Raise Finding if the case breaks a promise; return what was counted, such as comparisons.

        A key that begins with "worst " holds a number of which the largest is kept.
        """
        raise NotImplementedError

    def smaller(self, case: Case) -> Iterator[Case]:
        """Yield simpler cases, the simplest first."""
        yield from ()

    def close(self) -> None:
        """End what the part started."""


def draw_case(part: Part, seed: int, index: int) -> Case:
    return part.draw(random.Random(f"{seed} {part.name} {index}"))


def die_with_parent() -> None:
    """End this process when its parent ends, even if the parent was killed (on Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def failure(part: Part, case: Case) -> Finding | None:
    """Return what a case finds; an unexpected exception is a finding too."""
    try:
        part.check(case)
    except Finding as finding:
        return finding
    except Exception as error:
        return unexpected(error)
    return None


def unexpected(error: Exception) -> Finding:
    """Return the finding for an exception that no part expects."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "unknown place"
    text = "".join(traceback.format_exception(error))
    return Finding(f"{type(error).__name__} in {place}", text[-3000:])


def shrink(part: Part, case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case found for which ``fails`` holds, by steps of ``part.smaller``."""
    tries, end = 0, time.monotonic() + SHRINK_SECONDS
    progress = True
    while progress:
        progress = False
        for candidate in part.smaller(case):
            if candidate == case:
                continue
            tries += 1
            if tries > SHRINK_TRIES or time.monotonic() > end:
                return case
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def shrunk_finding(part: Part, case: Case, finding: Finding) -> tuple[Case, Finding]:
    """Return a smaller case with a finding of the same kind, and that finding."""

    def fails(candidate: Case) -> bool:
        found = failure(part, candidate)
        return found is not None and found.kind == finding.kind

    case = shrink(part, case, fails)
    return case, failure(part, case) or finding


def write_finding(folder: Path, record: dict[str, Any]) -> Path:
    """Write a reproduction as JSON and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = re.sub(r"[^a-zA-Z0-9]+", "-", record["kind"]).strip("-")[:60]
    path = folder / f"{record['part']}-{kind}-{record['index']}.json"
    again = f"PYTHONPATH=tests python -m fuzz replay {path}"
    path.write_text(json.dumps(record | {"replay": again}, indent=2) + "\n")
    return path


class Worker:
    """Runs cases of one part in this process, and reports to ``report``, a file of JSON lines.

    ``mark`` is a file that holds the index of the case that is running, for the process that watches.
    """

    def __init__(self, part: Part, seed: int, *, report: Path, mark: Path, findings: Path):
        self.part, self.seed, self.findings = part, seed, findings
        self.report = report.open("a", buffering=1)
        self.mark = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
        self.kinds: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()
        self.worst: dict[str, tuple[float, int]] = {}

    def tell(self, **line: Any) -> None:
        self.report.write(json.dumps(line) + "\n")

    def run(self, *, first: int, stride: int, seconds: float, cases: int | None = None) -> int:
        """Run cases first, first + stride, ... until the time or the number of cases is used up.

        Return the number of cases; the worker is closed then.
        """
        end, index, done, told = time.monotonic() + seconds, first, 0, time.monotonic()
        while time.monotonic() < end and (cases is None or done < cases):
            os.pwrite(self.mark, f"{index:<20}".encode(), 0)
            self.one(index)
            index, done = index + stride, done + 1
            if time.monotonic() - told > 2:
                self.flush()
                told = time.monotonic()
        self.flush()
        self.report.close()
        os.close(self.mark)
        return done

    def one(self, index: int) -> None:
        case = draw_case(self.part, self.seed, index)
        self.counted["cases"] += 1
        try:
            measured = self.part.check(case)
        except Exception as error:
            finding = error if isinstance(error, Finding) else unexpected(error)
            self.found(case, finding, index)
            return
        for name, value in measured.items():
            if not name.startswith("worst "):
                self.counted[name] += value
            elif value > self.worst.get(name, (-1.0, 0))[0]:
                self.worst[name] = (value, index)

    def found(self, case: Case, finding: Finding, index: int) -> None:
        self.kinds[finding.kind] += 1
        path = None
        if self.kinds[finding.kind] <= KEPT:
            case, finding = shrunk_finding(self.part, case, finding)
            record = {"part": self.part.name, "kind": finding.kind, "seed": self.seed, "index": index}
            path = write_finding(self.findings, record | {"message": finding.message, "case": case})
        self.tell(finding=finding.kind, message=finding.message[:400], file=path and str(path), index=index)

    def flush(self) -> None:
        self.tell(counted=dict(self.counted), worst=self.worst)
        self.counted, self.worst = Counter(), {}
