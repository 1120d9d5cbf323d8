"""The page: curves of all runs, and a table for every kind of record."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypermlp.bench import lm, mixers, op
from hypermlp.bench import table as efficiency
from hypermlp.bench.columns import table
from hypermlp.evals import run as evals
from hypermlp.mad.protocol import Cell
from hypermlp.mad.report import summarize
from hypermlp.pages import Series, line_chart, render
from hypermlp.records import check_writable, write_text
from hypermlp.report.sources import Run, Sources, gather

TEMPLATE = Path(__file__).parent / "report.html"
COLOURS = 8  # in page.css
Rows = list[list[str]]


class Kind(NamedTuple):
    """How records of a kind become one table, or one for each of them."""

    title: str
    tables: Callable[[list[dict[str, Any]]], list[str]]
    """Markdown."""


def _each(table: Callable[[Any], str]) -> Callable[[list[dict[str, Any]]], list[str]]:
    return lambda records: [table(record["results"]) for record in records]


def _efficiency(rows: list[dict[str, Any]]) -> str:
    timed = all("fwd_seconds" in row for row in rows)
    return table(rows, efficiency.COUNTED + efficiency.TIMED if timed else efficiency.COUNTED)


def _mad(records: list[dict[str, Any]]) -> list[str]:
    return [str(summarize((Cell(**record["settings"]), record["results"]) for record in records))]


def _study(records: list[dict[str, Any]]) -> list[str]:
    lines = ["| mixer | seed | loss | parameters | MFLOPs/token |", "| --- | ---: | ---: | ---: | ---: |"]
    for record in sorted(records, key=lambda record: record["results"]["loss"]):
        found, settings = record["results"], record["settings"]
        cells = [settings["mixer"], settings["recipe"]["training"]["seed"], f"{found['loss']:.4f}", f"{found['parameters']:,}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{found['forward_flops_per_token'] / 1e6:.2f}"])) + " |")
    return ["\n".join(lines)]


KINDS = {
    "eval": Kind("Evaluation", _each(evals.table)),
    "mad": Kind("MAD: accuracy in percent, published values in brackets", _mad),
    "study-lm": Kind("Language models of the design study", _study),
    "bench-op": Kind("Operator and layer against softmax attention", _each(lambda rows: op.table([op.Row(**row) for row in rows]))),
    "bench-lm": Kind("Training throughput", _each(lm.table)),
    "bench-mixers": Kind("What mixers cost", _each(mixers.table)),
    "bench-table": Kind("Efficiency", _each(_efficiency)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("places", nargs="+", metavar="RUN", help="runs of `hypermlp train`, records, or folders of them")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="default: report.html")
    parser.add_argument("--title", default="hypermlp: results", help="of the page")


def main(args: argparse.Namespace) -> None:
    check_writable(args.out)
    found = gather(args.places)
    write_text(args.out, page(found, args.title))
    left_out = sorted(found.records.keys() - KINDS.keys())
    counts = [f"{len(found.runs)} runs", *(f"{len(records)} of {kind}" for kind, records in found.records.items() if kind in KINDS)]
    print(f"wrote {args.out}: {', '.join(counts)}" + (f"; not shown: {', '.join(left_out)}" if left_out else ""))


def page(found: Sources, title: str) -> str:
    tables = [
        (kind.title, [cells(text) for text in kind.tables(found.records[name])], _origin(found.records[name]))
        for name, kind in KINDS.items()
        if name in found.records
    ]
    return render(TEMPLATE, title=title, runs=_runs(found.runs), charts=_charts(found.runs), names=_names(found.runs), tables=tables)


def cells(markdown: str) -> Rows:
    """Head and rows of the Markdown tables that the commands print."""
    rows = [[cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")] for line in markdown.splitlines()]
    return [rows[0], *rows[2:]]


def _origin(records: list[dict[str, Any]]) -> str:
    """When and where, as far as they agree."""
    days = sorted({str(record.get("created", ""))[:10] for record in records})
    machines = sorted({str(record.get("machine", {}).get("processor", "")) for record in records})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}; {', '.join(machines)}"


def _names(runs: list[Run]) -> list[tuple[str, str]]:
    return [(f"c{index % COLOURS}", run.name) for index, run in enumerate(runs)]


def _runs(runs: list[Run]) -> Rows:
    head = ["run", "mixer", "parameters", "steps", "tokens", "training loss", "validation loss"]
    rows = [
        [run.name, run.mixer, f"{run.parameters:,}", f"{run.steps:,}", f"{run.tokens:,}", _last(run.training), _last(run.validation)]
        for run in runs
    ]
    return [head, *rows] if rows else []


def _last(curve: list[tuple[int, float]]) -> str:
    return f"{curve[-1][1]:.4f}" if curve else ""


def _charts(runs: list[Run]) -> list[tuple[str, str]]:
    charts = []
    for what in ("training", "validation"):
        series = [
            Series(curve, f"c{index % COLOURS}", f"{run.name}\n{run.mixer}\n{curve[-1][1]:.4f} after {curve[-1][0]:,} steps")
            for index, run in enumerate(runs)
            if len(curve := getattr(run, what)) > 1
        ]
        if series:
            charts.append((what, line_chart(series, x="step", y=f"{what} loss")))
    return charts
