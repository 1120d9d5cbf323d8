"""Find the runs and records that a report is asked for."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.reporting.records import FORMAT, read_record
from hypermlp.validation import is_integer

METRICS = "metrics.jsonl"
LARGEST = 10**15
Curve = list[tuple[int, float]]
ALLOWED = "give runs of `hypermlp train`, records, or folders that contain them"


@dataclass(frozen=True)
class Run:
    """One training run of ``hypermlp train``."""

    path: Path
    name: str
    mixer: str
    parameters: int
    steps: int
    tokens: int
    training: Curve
    """(step, loss) pairs with a finite loss."""
    validation: Curve
    diverged: bool


@dataclass(frozen=True)
class Record:
    """One record and the file it was read from."""

    path: Path
    content: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The ``--out`` folder of a command that writes many records, each into a subfolder."""
        return self.path.parent.parent


@dataclass
class Sources:
    """Everything that was found."""

    runs: list[Run] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    """Records by kind, oldest first."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""


def gather(places: Iterable[str]) -> Sources:
    """Return the runs and records in ``places``, each once.

    A place is a record, a run, or a folder that contains runs and records. A damaged file in a folder becomes
    a problem; a place that contains nothing, or a file that is no record, raises UserError.
    """
    found = Sources()
    useful: dict[Path, bool] = {}  # file -> whether it holds a run or a record, possibly a damaged one
    for place in places:
        files = {file.resolve(): file for file in _files(Path(place))}
        useful |= {key: _add(found, file) for key, file in files.items() if key not in useful}
        if not any(useful[key] for key in files):
            raise UserError(f"{place} has no run and no record in it; {ALLOWED}")
    for records in found.records.values():
        records.sort(key=lambda record: str(record.content.get("created", "")))
    names = Counter(run.name for run in found.runs)
    found.runs = [run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in found.runs]
    return found


def _files(place: Path) -> list[Path]:
    if not place.exists():
        raise UserError(f"{place} does not exist; {ALLOWED}")
    if place.is_dir():
        return sorted([*place.rglob(METRICS), *place.rglob("*.json")])
    read_record(place)  # raises if the file is not a record
    return [place]


def _add(found: Sources, path: Path) -> bool:
    """Add the run or record in a file, or a problem if it is damaged. Return False for any other file."""
    try:
        if path.suffix == ".jsonl":
            found.runs.append(read_run(path.parent))
            return True
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT or "kind" not in content:
            return False  # such as a model's config.json
        found.records[str(content["kind"])].append(Record(path, read_record(path)))
    except Exception as error:  # a damaged file must not hide the others
        found.problems.append(f"{path}: damaged ({type(error).__name__}: {error})")
    return True


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; a line without its end is still being written.

    Raises UserError, with the file and the line, if a line is no object, a count is no whole number, or a
    number is larger than LARGEST, which no chart can show.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: {error}; restore it, or remove the run") from error
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [_checked_metrics(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _checked_metrics(line: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} is {line.strip()[:80]}; it must be an object")
    for key in {"step", "tokens", "parameters"} & content.keys():
        if not is_integer(content[key]) or not 0 <= content[key] <= LARGEST:
            raise UserError(f"{where}: {key} is {str(content[key])[:80]}; it must be 0 to {LARGEST:.0e}")
    for key in {"loss", "eval_train_loss", "eval_validation_loss"} & content.keys():
        value = content[key]
        is_real = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_real or LARGEST < abs(value) < math.inf:
            raise UserError(f"{where}: {key} is {str(value)[:80]}; it must be at most {LARGEST:.0e}")
    return content


def read_run(folder: Path) -> Run:
    """Return a run as far as it has been written; a line without its end is still being written."""
    mixer = json.loads((folder / "recipe.json").read_text())["model"].get("mixer", "G-cg-q-12o")
    lines = read_metrics(folder / METRICS)

    def values(key: str) -> list[Any]:
        return [line[key] for line in lines if key in line]

    def curve(key: str) -> Curve:
        finite = (line for line in lines if key in line and math.isfinite(line[key]))
        return sorted({line["step"]: float(line[key]) for line in finite}.items())

    return Run(
        path=folder,
        name=folder.name,
        mixer=mixer if isinstance(mixer, str) else ", ".join(dict.fromkeys(mixer)),
        parameters=next(iter(values("parameters")), 0),
        steps=max(values("step"), default=0),
        tokens=max(values("tokens"), default=0),
        training=curve("loss"),
        validation=curve("eval_validation_loss"),
        diverged=not all(map(math.isfinite, values("loss"))),
    )
