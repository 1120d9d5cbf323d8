"""Cells: trainings that are recorded once, and are not run again while their record exists.

The process that requested a cell writes its record as soon as the cell is done. An interruption therefore
loses only the cells that are running.
"""

import dataclasses
import hashlib
import json
import math
import re
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from hypermlp.errors import UserError
from hypermlp.files import check_writable
from hypermlp.jobs.workers import CellError, OnProgress, Progress, Results, Work, Workers
from hypermlp.reporting.records import new_record, read_record, write_record

PRINT_EVERY = 5.0  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """One training. Its fields define it completely: cells with equal fields give equal results."""

    kind: ClassVar[str]
    """Record kind."""
    mixer: str
    """Label or name of the mixer that is trained."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Human-readable title."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Path of the record within its folder, without the digest and the extension."""

    @abstractmethod
    def summary(self, result: dict[str, Any]) -> str:
        """Return a one-line summary of the result."""

    @classmethod
    def identity(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a cell's fields, as in its record, that distinguishes it from other cells.

        A class overrides this to leave out what was added to it later and has its default, so that records of
        earlier versions stay valid.
        """
        return settings

    @property
    def file_name(self) -> str:
        """The mixer's name, with every character that is unsafe in a file name replaced."""
        return re.sub(r"[^A-Za-z0-9.!@-]", "_", self.mixer)


def record_path(folder: Path, cell: Cell) -> Path:
    """Return the path of a cell's record, which contains a digest of the cell's identity."""
    identity = json.dumps(cell.identity(dataclasses.asdict(cell)), sort_keys=True)
    return folder / f"{cell.place}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


def recorded(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """Return the recorded result of a cell; None if ``folder`` has no record of exactly this cell."""
    record = cell_record(folder, cell)
    return None if record is None else record["results"]


def cell_record(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """Return the record of a cell; None if ``folder`` has no record of exactly this cell."""
    path = record_path(folder, cell)
    if not path.is_file():
        return None
    try:
        record = read_record(path, cell.kind)
    except ValueError as error:
        raise UserError(f"{error}; remove the file to run this cell again") from error
    wanted = json.loads(json.dumps(cell.identity(dataclasses.asdict(cell))))
    return record if cell.identity(record["settings"]) == wanted else None


def finite_fields(values: Any) -> dict[str, float | None]:
    """Return the fields of a named tuple for JSON, where non-finite numbers become None."""
    return {name: value if math.isfinite(value) else None for name, value in values._asdict().items()}


def run_cells(
    work: Work, wanted: list[Any], folder: Path, workers: Workers, *, on_progress: OnProgress
) -> Results:
    """Yield every cell with its result or CellError: recorded cells first, then the others as they finish."""
    known = [(cell, recorded(folder, cell)) for cell in wanted]
    yield from ((cell, result) for cell, result in known if result is not None)
    missing = [cell for cell, result in known if result is None]
    for cell, outcome in workers.run(work, missing, on_progress):
        if not isinstance(outcome, CellError):
            write_record(record_path(folder, cell), new_record(cell.kind, dataclasses.asdict(cell), outcome))
        yield cell, outcome


@dataclasses.dataclass
class Outcome:
    """Results and failures of the cells of one command."""

    results: list[tuple[Any, dict[str, Any]]]
    """Finished cells with their results, in the order in which the command listed the cells."""
    failures: list[CellError]

    def raise_if_failed(self) -> None:
        """Raise if any cell failed; call after printing the results."""
        if self.failures:
            reasons = "\n".join(map(str, self.failures))
            raise UserError(
                f"{len(self.failures)} of the cells failed; the others are recorded. "
                f"Run the same command again to retry the failed ones:\n{reasons}"
            )


def run_with_progress(work: Work, wanted: list[Any], folder: Path, workers: Workers) -> Outcome:
    """Run the cells that have no record in ``folder``, print progress to stderr and return all results."""
    check_writable(folder / "record")
    known = sum(recorded(folder, cell) is not None for cell in wanted)
    print_status(f"{known} of {len(wanted)} cells are recorded in {folder}")
    printer, outcome = ProgressPrinter(len(wanted) - known), Outcome([], [])
    try:
        for number, (cell, result) in enumerate(
            run_cells(work, wanted, folder, workers, on_progress=printer.update)
        ):
            if isinstance(result, CellError):
                outcome.failures.append(result)
                printer.finish(str(result))
            else:
                outcome.results.append((cell, result))
                if number >= known:
                    printer.finish(f"{cell.title}: {cell.summary(result)}")
    except KeyboardInterrupt:
        print_status(
            f"interrupted: {len(outcome.results)} of {len(wanted)} cells are recorded; "
            "run the same command again to continue"
        )
        raise
    outcome.results.sort(key=lambda item: wanted.index(item[0]))
    return outcome


def print_status(line: str) -> None:
    """Print a line to stderr, because stdout is for results."""
    print(line, file=sys.stderr, flush=True)


class ProgressPrinter:
    """Print progress with an ETA estimated from the finished cells."""

    def __init__(self, cells: int):
        self.cells, self.finished = cells, 0
        self.started = self.last_update = time.monotonic()

    def update(self, cell: Cell, progress: Progress) -> None:
        """Print the progress of a running cell, but not more often than every PRINT_EVERY seconds."""
        if time.monotonic() - self.last_update < PRINT_EVERY:
            return
        self.last_update = time.monotonic()
        left = progress.seconds * (progress.steps / progress.step - 1)  # less if the cell stops early
        print_status(
            f"  {cell.title}: step {progress.step}/{progress.steps}, {progress.metric}, "
            f"ETA of this cell at most {left:.0f} s"
        )

    def finish(self, line: str) -> None:
        """Print ``line``, which describes a finished cell, with the ETA of the remaining cells."""
        self.finished += 1
        left = (time.monotonic() - self.started) / self.finished * (self.cells - self.finished)
        eta = f"; ETA {left / 60:.0f} min" if self.finished < self.cells else ""
        print_status(f"[{self.finished}/{self.cells}] {line}{eta}")
