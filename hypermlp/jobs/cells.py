"""Cells: trainings that are recorded once, and not run again where everything that defines them is equal.

A record is written as soon as its cell is done, by the process that asked for it, so whatever is interrupted loses the running
cells at most.
"""

import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hypermlp.errors import UserError
from hypermlp.jobs.workers import CellError, Cluster, Local, Progress, Results, Tell, Work
from hypermlp.reporting.records import check_writable, new_record, read_record, write_record


class Cell(Protocol):
    """A frozen dataclass: its fields are everything that defines a training; equal fields give equal results."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]
    """Of its records."""

    @property
    def title(self) -> str:
        """For people."""

    @property
    def place(self) -> str:
        """Where its record goes, before a digest of the fields."""

    def say(self, result: dict[str, Any]) -> str:
        """What came out, for people."""


def record_path(folder: Path, cell: Cell) -> Path:
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(cell), sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{cell.place}-{digest}.json"


def recorded(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """The result of a cell that was run, if everything that defines it is equal."""
    path = record_path(folder, cell)
    if not path.is_file():
        return None
    try:
        record = read_record(path, cell.kind)
    except ValueError as error:
        raise UserError(f"{error}; remove it, and its cell is run again") from error
    same = record["settings"] == json.loads(json.dumps(dataclasses.asdict(cell)))
    results: dict[str, Any] = record["results"]
    return results if same else None


def run_cells(work: Work, wanted: list[Any], folder: Path, where: Local | Cluster, *, tell: Tell) -> Results:
    """Every cell with its result, or with what went wrong: first those that are recorded, then the others as they get done."""
    missing = []
    for cell in wanted:
        known = recorded(folder, cell)
        if known is None:
            missing.append(cell)
        else:
            yield cell, known
    for cell, result in where.run(work, missing, tell):
        if not isinstance(result, CellError):
            write_record(record_path(folder, cell), new_record(cell.kind, dataclasses.asdict(cell), result))
        yield cell, result


@dataclasses.dataclass
class Outcome:
    """Of a command: what came out, and what did not."""

    results: list[tuple[Any, dict[str, Any]]]
    failures: list[CellError]

    def complain(self) -> None:
        """After everything else was shown."""
        if self.failures:
            what = "\n".join(map(str, self.failures))
            raise UserError(
                f"{len(self.failures)} of the cells failed; the others are recorded, and the same command goes on:\n{what}"
            )


def run_and_tell(work: Work, wanted: list[Any], folder: Path, where: Local | Cluster) -> Outcome:
    """For a command: all of them, with lines about how far they are."""
    check_writable(folder / "record")
    known = sum(recorded(folder, cell) is not None for cell in wanted)
    tell_people(f"{len(wanted)} cell{'s' * (len(wanted) != 1)}, {known} of them recorded in {folder}")
    teller, outcome = Teller(len(wanted) - known), Outcome([], [])
    try:
        for i, (cell, result) in enumerate(run_cells(work, wanted, folder, where, tell=teller.progress)):
            if isinstance(result, CellError):
                outcome.failures.append(result)
                teller.done(f"{result}")
                continue
            outcome.results.append((cell, result))
            if i >= known:
                teller.done(f"{cell.title}: {cell.say(result)}")
    except KeyboardInterrupt:
        tell_people(
            f"interrupted: {len(outcome.results)} of {len(wanted)} are recorded, and the same command goes on"
        )
        raise
    return outcome


def tell_people(line: str) -> None:
    """Beside the results, which go to the standard output."""
    print(line, file=sys.stderr, flush=True)


class Teller:
    """How well the cells do so far, and time left, as far as those that are done tell."""

    def __init__(self, cells: int):
        self.cells, self.finished = cells, 0
        self.began = self.told = time.monotonic()

    def progress(self, cell: Cell, progress: Progress) -> None:
        if time.monotonic() - self.told < 5:
            return
        self.told = time.monotonic()
        left = progress.seconds * (progress.steps / progress.step - 1)
        tell_people(
            f"  {cell.title}: step {progress.step}/{progress.steps}, {progress.news}, at most {left:.0f} s left of this cell"
        )

    def done(self, what: str) -> None:
        self.finished += 1
        left = (time.monotonic() - self.began) / self.finished * (self.cells - self.finished)
        tell_people(
            f"[{self.finished}/{self.cells}] {what}"
            + f"; about {left / 60:.0f} min left" * (self.finished < self.cells)
        )
