"""Cells: trainings that are recorded once, and not run again where everything that defines them is equal.

A record is written as soon as its cell is done, by the process that asked for it, so whatever is interrupted loses the running
cells at most.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hypermlp.records import new_record, read_record, write_record
from hypermlp.workers import CellError, Cluster, Local, Progress, Results, Tell, Work


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
    record = read_record(path, cell.kind)
    same = record["settings"] == json.loads(json.dumps(dataclasses.asdict(cell)))
    results: dict[str, Any] = record["results"]
    return results if same else None


def run_cells(work: Work, wanted: list[Any], folder: Path, where: Local | Cluster, *, tell: Tell) -> Results:
    """Every cell with its result: first those that are recorded, then the others as they get done."""
    missing = []
    for cell in wanted:
        result = recorded(folder, cell)
        if result is None:
            missing.append(cell)
        else:
            yield cell, result
    for cell, result in where.run(work, missing, tell):
        write_record(record_path(folder, cell), new_record(cell.kind, dataclasses.asdict(cell), result))
        yield cell, result


def run_and_tell(work: Work, wanted: list[Any], folder: Path, where: Local | Cluster) -> list[tuple[Any, dict[str, Any]]]:
    """For a command: all of them, with lines about how far they are."""
    known = sum(recorded(folder, cell) is not None for cell in wanted)
    print(f"{len(wanted)} cells, {known} of them recorded in {folder}", flush=True)
    teller, results = Teller(len(wanted) - known), []
    try:
        for cell, result in run_cells(work, wanted, folder, where, tell=teller.progress):
            results.append((cell, result))
            if len(results) > known:
                teller.done(cell, result)
    except CellError as error:
        raise ValueError(error) from error
    return results


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
        at = f"step {progress.step}/{progress.steps}, {progress.news}"
        print(f"  {cell.title}: {at}, at most {left:.0f} s left of this cell", file=sys.stderr, flush=True)

    def done(self, cell: Cell, result: dict[str, Any]) -> None:
        self.finished += 1
        left = (time.monotonic() - self.began) / self.finished * (self.cells - self.finished)
        print(f"[{self.finished}/{self.cells}] {cell.title}: {cell.say(result)}; about {left / 60:.0f} min left", flush=True)
