"""Search for a case that breaks a promise: Hypothesis draws the cases and reduces the one that fails.

The search goes on in rounds until its time is used up. A round depends on the seed and on its number alone.
"""

import itertools
import json
import math
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz.core import Case, Check, Finding, Part, failure

ROUND = 10
"""Cases of a round. Later ones would mostly repeat parts of earlier ones, as Hypothesis draws them."""
SHRINK_SECONDS = 60.0
KEPT = 3
"""Reproductions that are written for one kind of finding; the others are counted."""


class Tally:
    """What a search counted, measured and found."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.findings: dict[str, dict[str, Any]] = {}

    def add(self, measured: dict[str, float]) -> None:
        for name, value in measured.items():
            if name.startswith("worst "):
                self.worst[name] = max(self.worst.get(name, 0.0), value)
            else:
                self.counted[name] += int(value)

    def found(self, kind: str, first: str, *, count: int = 1, files: tuple[str, ...] = ()) -> int:
        """Count findings of a kind, and return how many there are."""
        one = self.findings.setdefault(kind, {"count": 0, "first": first, "files": []})
        one["count"] += count
        one["files"] += files
        return one["count"]

    def merge(self, other: "Tally") -> None:
        self.add({**other.counted, **other.worst})
        for kind, one in other.findings.items():
            self.found(kind, **one)


class Search:
    """The search of one part.

    Args:
        part: what draws the cases.
        check: ``part.check``, or that of the part in a process of its own (``Watched``).
        seed: what all draws depend on.
        out: where reproductions and Hypothesis' database of failing examples are written.
    """

    def __init__(self, part: type[Part], check: Check, seed: str, out: Path):
        self.part, self.check, self.seed = part, check, seed
        self.cases = part.cases()
        self.findings = out / "findings"
        self.database = DirectoryBasedExampleDatabase(out / "examples" / part.name)
        self.tally = Tally()
        self.end = math.inf
        """When to stop, on the clock of ``time.monotonic``."""

    def run(self, seconds: float, cases: int | None = None) -> Tally:
        """Search for some seconds, or until some cases were checked, if that is earlier."""
        self.end = time.monotonic() + seconds
        for number in itertools.count():
            left = ROUND if cases is None else min(ROUND, cases - self.tally.counted["cases"])
            if left < 1 or time.monotonic() > self.end:
                break
            self.round(number, left)
        return self.tally

    def round(self, number: int, cases: int) -> Finding | None:
        """Check some cases; reduce, write and return the first one that fails."""
        failing: dict[
            str, Finding
        ] = {}  # findings by case, all of one kind; once time is up, new cases count as passing
        kind: str | None = None
        reduced: Case = {}
        end = self.end

        # The database brings back what failed in earlier runs.
        phases = [Phase.generate, Phase.shrink] + [Phase.reuse] * (number == 0)

        @settings(
            max_examples=cases, database=self.database, phases=phases, verbosity=Verbosity.quiet,
            deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.seed(f"{self.seed} {number}")
        @given(self.cases)
        def one(case: Case) -> None:
            nonlocal kind, reduced, end
            key = json.dumps(case)
            if key not in failing:
                if time.monotonic() > end:
                    return
                finding = self._first(case) if kind is None else failure(self.check, case)
                if not isinstance(finding, Finding) or finding.kind != (kind or finding.kind):
                    return
                if kind is None:
                    kind, end = finding.kind, time.monotonic() + SHRINK_SECONDS
                failing[key] = finding
            reduced = case
            raise Finding(failing[key].kind, failing[key].message)

        try:
            one()
        except Finding as finding:
            self._write(reduced, finding, number)
            return finding
        return None

    def _first(self, case: Case) -> Finding | None:
        """Check a case and count the result; return a finding that has to be reduced."""
        result = failure(self.check, case)
        self.tally.counted["cases"] += 1
        if not isinstance(result, Finding):
            self.tally.add(result)
            return None
        return result if self.tally.found(result.kind, result.message) <= KEPT else None

    def _write(self, case: Case, finding: Finding, number: int) -> None:
        """Write a reproduction as JSON and print how to run it again."""
        self.findings.mkdir(parents=True, exist_ok=True)
        kind = re.sub(r"[^a-zA-Z0-9]+", "-", f"{self.part.name}-{finding.kind}").strip("-")[:70]
        seed = re.sub(r"\W+", "-", self.seed)
        path = self.findings / f"{kind}-{seed}-{number}.json"
        again = f"PYTHONPATH=tests python -m fuzz replay {path}"
        record = {"part": self.part.name, "kind": finding.kind, "seed": self.seed, "round": number}
        record |= {"message": finding.message, "case": case, "replay": again}
        path.write_text(json.dumps(record, indent=2) + "\n")
        self.tally.findings[finding.kind]["files"].append(str(path))
        print(f"{self.part.name}: {finding.kind}: {finding.message[:400]}\n    {again}", flush=True)
