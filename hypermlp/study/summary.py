"""From the records of a study to its numbers: a row for each label, the rank correlation with the paper, the verdicts."""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.label import PAPER_ROWS
from hypermlp.label import PROBABLE_READING as OTHER_READINGS
from hypermlp.mad.protocol import Cell, read_cell
from hypermlp.mad.report import Table, summarize
from hypermlp.reporting.records import read_record
from hypermlp.study.claims import Verdict, judge
from hypermlp.study.intervals import Interval, spearman
from hypermlp.study.protocol import ROWS, LmCell

DIVERGED = {"S"}  # the paper's loss of it is a late divergence, not a target
ENOUGH = 4  # rows for a rank correlation
PAPER_LABEL = {other: label for label, other in OTHER_READINGS.items()}


@dataclass(frozen=True)
class Row:
    """A label's language models."""

    label: str
    losses: dict[int, float]
    """By seed."""
    parameters: int
    forward_flops_per_token: int
    curve: list[tuple[float, float]]
    """Validation loss at steps, the first seed's."""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def paper_loss(self) -> float | None:
        """Of another reading: of the paper's row that it may be."""
        return PAPER_ROWS[PAPER_LABEL.get(self.label, self.label)].loss if self.label in ROWS else None


@dataclass(frozen=True)
class Study:
    rows: dict[str, Row]
    mad: Table
    settings: dict[str, Any]
    """What the language models have in common."""
    machine: dict[str, Any]
    created: str
    data: str
    """Digest of the prepared data."""
    verdicts: list[Verdict] = field(default_factory=list)
    rank_correlation: Interval | None = None


def read_study(folder: Path) -> Study:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one that `hypermlp study run` wrote to")
    records = [read_record(path, LmCell.kind) for path in sorted((folder / "lm").glob("*.json"))]
    if not records:
        raise UserError(
            f"{folder} has no records of language models; `hypermlp study run --out {folder}` makes them"
        )
    common = _common([record["settings"] for record in records], folder)
    by_label: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_label[record["settings"]["mixer"]].append(record)
    found = {
        label: _row(label, by_label[label])
        for label in [*ROWS, *sorted(set(by_label) - set(ROWS))]
        if label in by_label
    }
    pairs = comparable(found)
    return Study(
        rows=found,
        mad=summarize(_mad_results(folder / "mad")),
        settings=common,
        machine=records[0]["machine"],
        created=max(record["created"] for record in records),
        data=records[0]["results"]["data_digest"],
        verdicts=judge({label: row.losses for label, row in found.items()}),
        rank_correlation=spearman(*pairs) if len(pairs[0]) >= ENOUGH else None,
    )


def comparable(rows: dict[str, Row]) -> tuple[list[float], list[float]]:
    """Our losses and the paper's, over the paper's own labels."""
    labels = [label for label in rows if label in PAPER_ROWS and label not in DIVERGED]
    return [rows[label].loss for label in labels], [PAPER_ROWS[label].loss for label in labels]


def _row(label: str, records: list[dict[str, Any]]) -> Row:
    results = {record["settings"]["recipe"]["training"]["seed"]: record["results"] for record in records}
    first = results[min(results)]
    return Row(
        label=label,
        losses={seed: results[seed]["loss"] for seed in sorted(results)},
        parameters=first["parameters"],
        forward_flops_per_token=first["forward_flops_per_token"],
        curve=[(step, value) for step, value in first["curves"]["validation"]],
    )


def _common(settings: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A recipe without what differs on purpose; two studies in one folder are an error."""
    found = []
    for each in settings:
        recipe = {key: dict(each["recipe"][key]) for key in ("model", "data", "training")}
        recipe["model"].pop("mixer")
        recipe["training"].pop("seed")
        found.append({**recipe, "loss": each["loss"]})
    different = next((i for i, each in enumerate(found) if each != found[0]), None)
    if different is not None:
        one, other = (_flat(found[i]) for i in (0, different))
        key = next(key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key))
        raise UserError(
            f"{folder} has records of more than one study: {key} is {one.get(key)} for {settings[0]['mixer']}, {other.get(key)} for "
            f"{settings[different]['mixer']}; a page is of one (and `study tune` prints its own table)"
        )
    return found[0]


def _flat(common: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name in ("model", "data", "training")
        for key, value in common[name].items()
    } | {"loss": common["loss"]}


def _mad_results(folder: Path) -> list[tuple[Cell, dict[str, Any]]]:
    results = []
    for path in sorted(folder.glob("*/*.json")):
        record = read_record(path, Cell.kind)
        results.append((read_cell(record["settings"]), record["results"]))
    return results


def summary(study: Study) -> dict[str, Any]:
    """For summary.json."""
    rows = {
        label: {
            "loss": row.loss,
            "seeds": list(row.losses.values()),
            "seed_numbers": list(row.losses),
            "parameters": row.parameters,
            "forward_flops_per_token": row.forward_flops_per_token,
            "paper_loss": row.paper_loss,
            "mad": study.mad.scores.get(label, {}),
        }
        for label, row in study.rows.items()
    }
    claims = [
        {
            "claim": verdict.claim.name,
            "verdict": verdict.verdict,
            "pairs": [
                {"worse": pair.worse, "better": pair.better, **_plain(pair.effect), "verdict": pair.verdict}
                for pair in verdict.pairs
            ],
        }
        for verdict in study.verdicts
    ]
    correlation = _plain(study.rank_correlation) if study.rank_correlation else None
    return {
        "rows": rows,
        "spearman": correlation,
        "claims": claims,
        "settings": study.settings,
        "data_digest": study.data,
    }


def _plain(found: Interval) -> dict[str, float | None]:
    """JSON has no word for an interval without end."""
    return {name: value if math.isfinite(value) else None for name, value in found._asdict().items()}
