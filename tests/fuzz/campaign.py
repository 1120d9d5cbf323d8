"""A run of all fuzzers: processes that are watched, ended and started again, and the record of the run.

Every lane runs all parts one after another, each in a process of its own; lanes have different cases. A
process that crashes or hangs is a finding, and the next one continues after that case.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.core import (
    KEPT,
    Case,
    Worker,
    die_with_parent,
    draw_case,
    environment,
    shrink,
    write_finding,
)
from fuzz.parts import PARTS

POLL = 0.25


class Job:
    """One part on one lane, in one process after another."""

    def __init__(self, part: str, lane: int, lanes: int, seed: int, out: Path):
        self.part, self.lane, self.lanes, self.seed = part, lane, lanes, seed
        self.findings = out / "findings"
        self.folder = out / "work" / f"{part}-{lane}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.report, self.mark = self.folder / "report.jsonl", self.folder / "mark"
        self.errors = self.folder / "stderr.txt"

    def run(self, seconds: float, cases: int | None = None) -> None:
        """Run the part for some seconds, or for some cases if that is less."""
        end, first, left = time.monotonic() + seconds, self.lane, cases
        while (remaining := end - time.monotonic()) > 0 and (left is None or left > 0):
            code, reason = self._process(first, remaining, left)
            if code == 0:
                return
            index = int(self.mark.read_text() or first) if self.mark.exists() else first
            self._ended(index, reason or f"ended with status {code}", code)
            left = None if left is None else left - 1 - (index - first) // self.lanes
            first = index + self.lanes

    def _process(self, first: int, seconds: float, cases: int | None) -> tuple[int, str]:
        words = [self.part, str(self.seed), str(first), str(self.lanes), str(seconds), str(cases or 0)]
        folders = [str(self.folder), str(self.findings)]
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "fuzz", "worker", *words, *folders],
                cwd=self.folder, env=environment(self.part), stdout=errors, stderr=errors,
            )  # fmt: skip
        try:
            return self._watch(process, seconds)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _watch(self, process: "subprocess.Popen[bytes]", seconds: float) -> tuple[int, str]:
        """Wait for the process; end it with its stack in the log if one case takes too long.

        Polls are counted, not seconds: a machine that was suspended has not hung.
        """
        limit, before, polls = PARTS[self.part].limit, "", 0
        while process.poll() is None:
            time.sleep(POLL)
            now = self.mark.read_text() if self.mark.exists() else ""
            before, polls = now, polls + 1 if now == before else 0
            if polls * POLL > limit:
                process.send_signal(signal.SIGABRT)
                process.wait()
                return process.returncode, f"no end after {limit:.0f} s"
        return process.returncode, ""

    def _ended(self, index: int, reason: str, code: int) -> None:
        """Record a case that ended its process."""
        part = PARTS[self.part](self.folder)
        case = draw_case(part, self.seed, index)
        kind = "hang" if reason.startswith("no end") else f"crash, {_signal(code)}"
        if kind != "hang":
            case = shrink(part, case, self._crashes)
        log = self.errors.read_bytes()[-3000:].decode(errors="replace")
        record: dict[str, Any] = {"part": self.part, "kind": kind, "seed": self.seed, "index": index}
        path = write_finding(self.findings, record | {"message": f"{reason}\n{log}", "case": case})
        with self.report.open("a") as report:
            line = {"finding": kind, "message": reason, "file": str(path), "index": index}
            report.write(json.dumps(line) + "\n")

    def _crashes(self, case: Case) -> bool:
        file = self.folder / "candidate.json"
        file.write_text(json.dumps({"part": self.part, "case": case}))
        command = [sys.executable, "-m", "fuzz", "replay", str(file)]
        try:
            done = subprocess.run(
                command, env=environment(self.part), cwd=self.folder, capture_output=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode < 0

    def summary(self) -> dict[str, Any]:
        """Return the counts, worst errors and findings that the processes reported."""
        counted: Counter[str] = Counter()
        worst: dict[str, list[float]] = {}
        findings: dict[str, dict[str, Any]] = {}
        for line in self.report.read_text().splitlines() if self.report.exists() else ():
            told = json.loads(line)
            counted.update(told.get("counted", {}))
            for name, pair in told.get("worst", {}).items():
                worst[name] = max(worst.get(name, [-1.0, 0]), pair)
            if "finding" in told:
                one = findings.setdefault(
                    told["finding"], {"count": 0, "first": told["message"], "files": []}
                )
                one["count"] += 1
                one["files"] += [told["file"]] if told["file"] and len(one["files"]) < KEPT else []
        return {"counted": counted, "worst": worst, "findings": findings}


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def merged(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one summary of the lanes of a part."""
    counted: Counter[str] = Counter()
    worst: dict[str, dict[str, float]] = {}
    findings: dict[str, dict[str, Any]] = {}
    for summary in summaries:
        counted.update(summary["counted"])
        for name, (value, index) in summary["worst"].items():
            if value > worst.get(name, {"value": -1.0})["value"]:
                worst[name] = {"value": value, "index": index}
        for kind, found in summary["findings"].items():
            one = findings.setdefault(kind, {"count": 0, "first": found["first"], "files": []})
            one["count"] += found["count"]
            one["files"] += found["files"]
    return {
        "counted": dict(sorted(counted.items())),
        "worst": dict(sorted(worst.items())),
        "findings": findings,
    }


def work(words: list[str]) -> int:
    """Run cases of one part in this process; ``Job`` starts it."""
    import faulthandler

    faulthandler.enable()
    die_with_parent()
    name, *numbers, folder, findings = words
    seed, first, stride, seconds, cases = (float(x) if "." in x else int(x) for x in numbers)
    part = PARTS[name](Path(folder))
    worker = Worker(
        part,
        int(seed),
        report=Path(folder) / "report.jsonl",
        mark=Path(folder) / "mark",
        findings=Path(findings),
    )
    try:
        worker.run(first=int(first), stride=int(stride), seconds=float(seconds), cases=int(cases) or None)
    finally:
        part.close()
    return 0
