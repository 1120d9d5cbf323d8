"""What lies in the folders and files that a report is asked for."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.reporting.records import FORMAT, read_record

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Run:
    """A training of ``hypermlp train``."""

    path: Path
    name: str
    mixer: str
    parameters: int
    steps: int
    tokens: int
    training: Curve
    """(step, loss), as far as losses are finite."""
    validation: Curve
    diverged: bool


@dataclass(frozen=True)
class Record:
    path: Path
    content: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The ``--out`` of commands that write many records, each into a folder of it."""
        return self.path.parent.parent


@dataclass
class Sources:
    runs: list[Run] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=dict)
    """By kind, oldest first."""
    problems: list[str] = field(default_factory=list)
    """What could not be read in a folder."""

    def __len__(self) -> int:
        return len(self.runs) + sum(map(len, self.records.values()))


def gather(places: list[str]) -> Sources:
    """Runs, records, and folders with any of them in. A place with nothing raises, and so does a file that is no record."""
    found, seen = Sources(), set[Path]()
    for place in places:
        path = Path(place)
        if not path.exists():
            raise UserError(
                f"{place} does not exist; name runs of `hypermlp train`, records, or folders of them"
            )
        inside = [path] if path.is_file() else sorted([*path.rglob("metrics.jsonl"), *path.rglob("*.json")])
        if path.is_file():
            read_record(path)
        before = len(found) + len(found.problems)
        for each in inside:
            if each.resolve() not in seen:
                _add(found, each)
        if len(found) + len(found.problems) == before and not seen & {each.resolve() for each in inside}:
            raise UserError(f"{place} has no run and no record in it")
        seen.update(each.resolve() for each in inside)
    for records in found.records.values():
        records.sort(key=lambda record: str(record.content.get("created", "")))
    short = [run.name for run in found.runs]
    found.runs = [
        replace(run, name=run.name if short.count(run.name) == 1 else str(run.path)) for run in found.runs
    ]
    return found


def _add(found: Sources, path: Path) -> None:
    try:
        if path.name == "metrics.jsonl":
            found.runs.append(read_run(path.parent))
            return
        for record in _records(path):
            found.records.setdefault(str(record.content["kind"]), []).append(record)
    except Exception as error:  # one damaged file does not take the page from the others
        found.problems.append(
            f"{path}: {error}"
            if isinstance(error, ValueError)
            else f"{path}: {type(error).__name__}: {error}"
        )


def _records(path: Path) -> Iterator[Record]:
    """A file's, if it is a record; a model's own files are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"damaged: {error}") from error
    if isinstance(content, dict) and content.get("format") == FORMAT and "kind" in content:
        yield Record(path, read_record(path))


def read_run(folder: Path) -> Run:
    recipe = json.loads((folder / "recipe.json").read_text())
    # A line that is being written is left for the next time.
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    mixer = recipe["model"].get("mixer", "G-cg-q-12o")
    losses = [line["loss"] for line in lines if "loss" in line]

    def curve(key: str) -> Curve:
        return sorted(
            {
                line["step"]: float(line[key]) for line in lines if key in line and math.isfinite(line[key])
            }.items()
        )

    return Run(
        path=folder,
        name=folder.name,
        mixer=mixer if isinstance(mixer, str) else ", ".join(dict.fromkeys(mixer)),
        parameters=next((line["parameters"] for line in lines if "parameters" in line), 0),
        steps=max((line["step"] for line in lines), default=0),
        tokens=max((line["tokens"] for line in lines if "tokens" in line), default=0),
        training=curve("loss"),
        validation=curve("eval_validation_loss"),
        diverged=not all(map(math.isfinite, losses)),
    )
