"""``hypermlp report``: curves of all runs and a table for every kind of record, on one page."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypermlp.bench import efficiency, gpu, lm, op, window
from hypermlp.commands.shared import Args, Argument, command
from hypermlp.evals import positions, recall
from hypermlp.evals.figures import position_chart, write_position_figure
from hypermlp.evals.table import score_table
from hypermlp.files import check_writable, write_text
from hypermlp.mad.protocol import grid_of, read_cell
from hypermlp.mad.report import summarize
from hypermlp.reporting.results import Kind, Records, results_page
from hypermlp.reporting.sources import Record, gather
from hypermlp.reporting.table import Table
from hypermlp.study.tables import losses_table


@command(
    Argument(
        "places",
        nargs="+",
        metavar="RUN",
        help="runs of `hypermlp train`, records, or folders that contain them",
    ),
    Argument("--out", default="report.html", metavar="FILE", help="default: report.html"),
    Argument("--title", default="hypermlp: results", help="title of the page"),
    Argument(
        "--figure",
        metavar="NAME",
        help="also draw the losses by position of all records as NAME.png and NAME.svg",
    ),
)
def main(args: Args) -> None:
    check_writable(args.out)
    found = gather(args.places)
    write_text(args.out, results_page(found, KINDS, args.title))
    if args.figure:
        for path in write_position_figure(_rows(found.records[positions.KIND]), Path(args.figure)):
            print(f"wrote {path}")
    counts = [f"{len(records)} of {kind}" for kind, records in found.records.items() if kind in KINDS]
    print(f"wrote {args.out}: {', '.join([f'{len(found.runs)} runs', *counts])}")
    for problem in found.problems:
        print(f"left out: {problem}", file=sys.stderr)


def _rows(records: Records) -> list[dict[str, Any]]:
    """Return the rows of several records."""
    return [row for record in records for row in record.content["results"]]


def _all_rows(table: Callable[[list[dict[str, Any]]], Table]) -> Callable[[Records], Table]:
    """Return a function that puts the rows of several records into one table."""
    return lambda records: table(_rows(records))


def _position_table(records: Records) -> Table:
    context = min(record.content["settings"]["context"] for record in records)
    return positions.position_table(_rows(records), context)


def _mad_table(records: Records) -> Table:
    return summarize(
        (read_cell(record.content["settings"]), record.content["results"]) for record in records
    ).table()


def _mad_grid(record: Record) -> str:
    """Return the grid of a record, or its settings if they were changed by hand, as the key to average by."""
    settings, cell = record.content["settings"], read_cell(record.content["settings"])
    if grid_of(cell):
        return f"{record.folder}, {grid_of(cell)} grid"
    changed = settings["settings"] | settings["training"] | {"width": cell.width, "seed": cell.seed}
    given = (f"{name} {value}" for name, value in changed.items() if value is not None)
    return f"{record.folder}, {', '.join(given)}"


def _study_recipe(record: Record) -> str:
    """Return the recipe without the mixer and the seed: what the rows of one table have in common."""
    recipe = record.content["settings"]["recipe"]
    settings = {**recipe["model"], **recipe["data"], **recipe["training"], "mixer": None, "seed": None}
    return f"{record.folder} {json.dumps(settings, sort_keys=True)}"


def _study_about(records: Records) -> str:
    recipe = records[0].content["settings"]["recipe"]
    about = "{num_hidden_layers} layers of width {hidden_size}, {steps} steps, learning rate {learning_rate}"
    return f"{records[0].folder}: {about.format_map(recipe['model'] | recipe['training'])}"


KINDS = {
    "eval": Kind(
        "Evaluation",
        _all_rows(score_table),
        group=lambda record: json.dumps(record.content["settings"], sort_keys=True),
    ),
    positions.KIND: Kind(
        "Loss by position",
        _position_table,
        group=lambda record: f"{record.path.parent} {record.content['settings']['context']}",
        chart=lambda records: position_chart(_rows(records)),
    ),
    recall.SUITE: Kind("Recall by length, in percent", _all_rows(recall.recall_table)),
    "bench-window": Kind("Sliding windows", _all_rows(window.table)),
    "mad": Kind(
        "MAD: accuracy in percent, published values in brackets",
        _mad_table,
        group=_mad_grid,
        about=lambda records: _mad_grid(records[0]),
    ),
    "study-lm": Kind(
        "Language models of the design study",
        lambda records: losses_table(
            (record.content["settings"], record.content["results"]) for record in records
        ),
        group=_study_recipe,
        about=_study_about,
    ),
    "gpu-check": Kind("The Triton kernels on a GPU", _all_rows(gpu.table)),
    "bench-op": Kind("Operator and layer against softmax attention", _all_rows(op.table)),
    "bench-goals": Kind("Goals of the CPU kernels", _all_rows(op.goal_table)),
    "bench-commits": Kind("The layer of two commits", _all_rows(op.commit_table)),
    "bench-lm": Kind("Training throughput", _all_rows(lm.throughput_table)),
    "bench-mixers": Kind("Costs of all mixers", _all_rows(lm.cost_table)),
    "bench-table": Kind("Efficiency", _all_rows(efficiency.table)),
}
