"""Every kind of record, and how records of it become tables."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from hypermlp.bench import lm, mixers, op
from hypermlp.bench import table as efficiency
from hypermlp.bench.columns import table
from hypermlp.evals import run as evals
from hypermlp.mad.protocol import grid_of, read_cell
from hypermlp.mad.report import summarize
from hypermlp.report.sources import Record

Records = list[Record]


def _alone(record: Record) -> str:
    return str(record.path)


def _settings(records: Records) -> str:
    """Of the first: what is a word or a number."""
    found = records[0].content["settings"].items()
    return ", ".join(
        f"{name} {value}"
        for name, value in found
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    )


class Kind(NamedTuple):
    title: str
    table: Callable[[Records], str]
    """Markdown, of records that belong together."""
    belonging: Callable[[Record], str] = _alone
    """Records for which it is equal belong together."""
    about: Callable[[Records], str] = _settings


def _rows(show: Callable[[Any], str]) -> Callable[[Records], str]:
    """All their rows in one table."""
    return lambda records: show([row for record in records for row in record.content["results"]])


def _efficiency(rows: list[dict[str, Any]]) -> str:
    timed = all("fwd_seconds" in row for row in rows)
    return table(rows, efficiency.COUNTED + efficiency.TIMED if timed else efficiency.COUNTED)


def _mad(records: Records) -> str:
    return str(
        summarize((read_cell(record.content["settings"]), record.content["results"]) for record in records)
    )


def _mad_grid(record: Record) -> str:
    """Cells of one grid are averaged; what was changed by hand stands alone."""
    cell = read_cell(record.content["settings"])
    grid = grid_of(cell)
    if grid:
        return f"{record.folder}, {grid} grid"
    changed = (
        record.content["settings"]["settings"]
        | record.content["settings"]["training"]
        | {"width": cell.width, "seed": cell.seed}
    )
    return f"{record.folder}, " + ", ".join(
        f"{name} {value}" for name, value in changed.items() if value is not None
    )


def _study(records: Records) -> str:
    lines = ["| mixer | seed | loss | parameters | MFLOPs/token |", "| --- | ---: | ---: | ---: | ---: |"]
    for record in sorted(records, key=lambda record: float(record.content["results"]["loss"])):
        found, settings = record.content["results"], record.content["settings"]
        cells = [
            settings["mixer"],
            settings["recipe"]["training"]["seed"],
            f"{found['loss']:.4f}",
            f"{found['parameters']:,}",
        ]
        lines.append(
            "| " + " | ".join(map(str, [*cells, f"{found['forward_flops_per_token'] / 1e6:.2f}"])) + " |"
        )
    return "\n".join(lines)


def _study_recipe(record: Record) -> str:
    """All that its rows have in common."""
    recipe = record.content["settings"]["recipe"]
    common = {key: dict(recipe[key]) for key in ("model", "data", "training")}
    common["model"].pop("mixer", None)
    common["training"].pop("seed", None)
    return f"{record.folder} {json.dumps(common, sort_keys=True)}"


def _study_about(records: Records) -> str:
    recipe = records[0].content["settings"]["recipe"]
    model, training = recipe["model"], recipe["training"]
    shape = f"{model['num_hidden_layers']} layers of width {model['hidden_size']}"
    return f"{records[0].folder}: {shape}, {training['steps']} steps, learning rate {training['learning_rate']:g}"


KINDS = {
    "eval": Kind(
        "Evaluation",
        _rows(evals.table),
        lambda record: json.dumps(record.content["settings"], sort_keys=True),
    ),
    "mad": Kind(
        "MAD: accuracy in percent, published values in brackets",
        _mad,
        _mad_grid,
        lambda records: _mad_grid(records[0]),
    ),
    "study-lm": Kind("Language models of the design study", _study, _study_recipe, _study_about),
    "bench-op": Kind(
        "Operator and layer against softmax attention",
        _rows(lambda rows: op.table([op.Row(**row) for row in rows])),
    ),
    "bench-lm": Kind("Training throughput", _rows(lm.table)),
    "bench-mixers": Kind("What mixers cost", _rows(mixers.table)),
    "bench-table": Kind("Efficiency", _rows(_efficiency)),
}
