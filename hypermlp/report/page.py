"""``hypermlp report``: curves of all runs and a table for every kind of record, on one page."""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from hypermlp.errors import UserError
from hypermlp.report.kinds import KINDS, Kind, Records
from hypermlp.report.sources import Run, Sources, gather
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import render
from hypermlp.reporting.records import check_writable, write_text

TEMPLATE = Path(__file__).parent / "report.html"
COLOURS = 8  # in page.css


class Cell(NamedTuple):
    text: str
    best: bool = False


Rows = list[list[Cell]]


class Shown(NamedTuple):
    """One table."""

    rows: Rows
    about: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places", nargs="+", metavar="RUN", help="runs of `hypermlp train`, records, or folders of them"
    )
    parser.add_argument("--out", default="report.html", metavar="FILE", help="default: report.html")
    parser.add_argument("--title", default="hypermlp: results", help="of the page")


def main(args: argparse.Namespace) -> None:
    check_writable(args.out)
    found = gather(args.places)
    text = page(found, args.title)
    write_text(args.out, text)
    counts = [
        f"{len(found.runs)} runs",
        *(f"{len(records)} of {kind}" for kind, records in found.records.items() if kind in KINDS),
    ]
    print(f"wrote {args.out}: {', '.join(counts)}")
    for problem in found.problems:
        print(f"left out: {problem}", file=sys.stderr)


def page(found: Sources, title: str) -> str:
    """What cannot be shown is added to the problems, and said on the page."""
    for kind in sorted(found.records.keys() - KINDS.keys()):
        found.problems += [
            f"{record.path}: records of kind {kind!r} have no table" for record in found.records[kind]
        ]
    shown = {
        kind.title: _tables(kind, found.records.get(name, []), found.problems) for name, kind in KINDS.items()
    }
    sections = [(title, tables) for title, tables in shown.items() if tables]
    if not found.runs and not sections:
        raise UserError("there is nothing to show: " + "; ".join(found.problems))
    names = [(f"c{index % COLOURS}", run.name) for index, run in enumerate(found.runs)]
    return render(
        TEMPLATE,
        title=title,
        runs=_runs(found.runs),
        charts=_charts(found.runs),
        names=names,
        sections=sections,
        problems=found.problems,
    )


def _tables(kind: Kind, records: Records, problems: list[str]) -> list[Shown]:
    groups: dict[str, Records] = defaultdict(list)
    for record in records:
        try:
            _shown(kind, [record])  # so that a damaged one does not take the others with it
            groups[kind.belonging(record)].append(record)
        except Exception as error:  # whatever is wrong with what somebody wrote
            problems.append(f"{record.path}: not as its kind should be ({type(error).__name__}: {error})")
    return [_shown(kind, group) for group in groups.values()]


def _shown(kind: Kind, group: Records) -> Shown:
    return Shown(cells(kind.table(group)), f"{kind.about(group)}. {_origin(group)}.")


def cells(markdown: str) -> Rows:
    """Head and rows of the Markdown tables that the commands print."""
    rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in markdown.splitlines()]
    return [[_cell(text.strip().replace("\\|", "|")) for text in row] for row in (rows[0], *rows[2:])]


def _cell(text: str) -> Cell:
    bold = re.fullmatch(r"\*\*(.*)\*\*", text)
    return Cell(bold[1], best=True) if bold else Cell(text)


def _origin(records: Records) -> str:
    """Where, when and on what, as far as they agree."""
    contents = [record.content for record in records]
    days = sorted({str(each.get("created", ""))[:10] for each in contents})
    machines = sorted({str((each.get("machine") or {}).get("processor", "")) for each in contents})
    files = str(records[0].path) if len(records) == 1 else f"{len(records)} records"
    return f"{files}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, {', '.join(machines)}"


def _runs(runs: list[Run]) -> Rows:
    head = ["run", "mixer", "parameters", "steps", "tokens", "training loss", "validation loss"]
    rows = [
        [run.name, run.mixer, f"{run.parameters:,}", f"{run.steps:,}", f"{run.tokens:,}",
         "diverged" if run.diverged else _last(run.training), _last(run.validation)]
        for run in runs
    ]  # fmt: skip
    return [[Cell(text) for text in row] for row in (head, *rows)] if rows else []


def _last(curve: list[tuple[int, float]]) -> str:
    return f"{curve[-1][1]:.4f}" if curve else ""


def _charts(runs: list[Run]) -> list[tuple[str, str]]:
    charts = []
    for what in ("training", "validation"):
        series = [
            Series(
                curve,
                f"c{index % COLOURS}",
                f"{run.name}\n{run.mixer}\n{curve[-1][1]:.4f} after {curve[-1][0]:,} steps",
            )
            for index, run in enumerate(runs)
            if len(curve := getattr(run, what)) > 1
        ]
        if series:
            charts.append((what, line_chart(series, x="step", y=f"{what} loss")))
    return charts
