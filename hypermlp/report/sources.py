"""What lies in the folders and files that a report is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypermlp.records import FORMAT, read_record


@dataclass(frozen=True)
class Run:
    """A training of ``hypermlp train``."""

    name: str
    mixer: str
    parameters: int
    steps: int
    tokens: int
    training: list[tuple[int, float]]
    """(step, loss)."""
    validation: list[tuple[int, float]]


@dataclass
class Sources:
    runs: list[Run] = field(default_factory=list)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By kind, oldest first."""

    def add(self, record: dict[str, Any]) -> None:
        self.records.setdefault(record["kind"], []).append(record)


def gather(places: list[str]) -> Sources:
    """Runs, records, and folders with any of them in; a place with nothing raises."""
    found = Sources()
    for place in places:
        path = Path(place)
        if not path.exists():
            raise ValueError(f"{place} does not exist; name runs of `hypermlp train`, records, or folders of them")
        before = len(found.runs) + sum(map(len, found.records.values()))
        if path.is_file():
            found.add(read_record(path))
        else:
            found.runs += [read_run(metrics.parent) for metrics in sorted(path.rglob("metrics.jsonl"))]
            for record in _records(path):
                found.add(record)
        if len(found.runs) + sum(map(len, found.records.values())) == before:
            raise ValueError(f"{place} has no run and no record in it")
    for records in found.records.values():
        records.sort(key=lambda record: str(record.get("created", "")))
    return found


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """Those among the JSON files; a model's own files are none."""
    for path in sorted(folder.rglob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if isinstance(found, dict) and found.get("format") == FORMAT and "kind" in found:
            yield read_record(path)


def read_run(folder: Path) -> Run:
    recipe = json.loads((folder / "recipe.json").read_text())
    # A line that is being written is left for the next time.
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    mixer = recipe["model"].get("mixer", "G-cg-q-12o")

    def curve(key: str) -> list[tuple[int, float]]:
        return sorted({line["step"]: line[key] for line in lines if key in line}.items())

    return Run(
        name=folder.name,
        mixer=mixer if isinstance(mixer, str) else ", ".join(dict.fromkeys(mixer)),
        parameters=next((line["parameters"] for line in lines if "parameters" in line), 0),
        steps=max((line["step"] for line in lines), default=0),
        tokens=max((line["tokens"] for line in lines if "tokens" in line), default=0),
        training=curve("loss"),
        validation=curve("eval_validation_loss"),
    )
