"""The results page: loss curves of runs, and tables of records of any kind."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hypermlp.errors import UserError
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import render
from hypermlp.reporting.sources import Curve, Record, Run, Sources
from hypermlp.reporting.table import Columns, Table

TEMPLATE = Path(__file__).parent / "results.html"
COLOURS = 8  # in page.css
Records = list[Record]


class Section(NamedTuple):
    """A table of the page, with its caption and the chart above it (SVG, or empty)."""

    caption: str
    table: Table
    chart: str


def settings_of(records: Records) -> str:
    """Return the words and numbers among the settings of the first record."""
    return ", ".join(
        f"{name} {value}"
        for name, value in records[0].content["settings"].items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    )


class Kind(NamedTuple):
    """How the records of one kind are shown."""

    title: str
    table: Callable[[Records], Table]
    """Return the table of records that belong together."""
    group: Callable[[Record], str] = lambda record: str(record.path)
    """Return the key of the table that a record goes into. By default every record has a table of its own."""
    about: Callable[[Records], str] = settings_of
    """Return the caption of a table."""
    chart: Callable[[Records], str] = lambda records: ""
    """Return a chart of records that belong together, as SVG; empty for none."""


def results_page(found: Sources, kinds: Mapping[str, Kind], title: str) -> str:
    """Return the page. Records that cannot be shown become further ``found.problems``, listed on the page."""
    for kind in sorted(found.records.keys() - kinds.keys()):
        reason = f"records of kind {kind!r} have no table"
        found.problems += [f"{record.path}: {reason}" for record in found.records[kind]]
    sections = {
        kind.title: _sections(kind, found.records.get(name, []), found.problems)
        for name, kind in kinds.items()
    }
    if not found.runs and not any(sections.values()):
        raise UserError("there is nothing to show: " + "; ".join(found.problems))
    colours = {run.name: f"c{index % COLOURS}" for index, run in enumerate(found.runs)}
    return render(
        TEMPLATE,
        title=title,
        runs=_run_table(found.runs),
        charts=_charts(found.runs, colours),
        colours=colours,
        sections=sections,
        problems=found.problems,
    )


def _sections(kind: Kind, records: Records, problems: list[str]) -> list[Section]:
    groups: dict[str, Records] = defaultdict(list)
    for record in records:
        try:
            _section(kind, [record])  # alone: one damaged record must not hide its group
            groups[kind.group(record)].append(record)
        except Exception as error:  # a damaged record may fail in any way
            problems.append(f"{record.path}: not as its kind should be ({type(error).__name__}: {error})")
    return [_section(kind, group) for group in groups.values()]


def _section(kind: Kind, records: Records) -> Section:
    """Return the table, captioned with its file or number of records, its days and its processors."""
    contents = [record.content for record in records]
    days = sorted({str(each.get("created", ""))[:10] for each in contents})
    machines = sorted({str((each.get("machine") or {}).get("processor", "")) for each in contents})
    files = str(records[0].path) if len(records) == 1 else f"{len(records)} records"
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    caption = f"{kind.about(records)}. {files}, {period}, {', '.join(machines)}."
    return Section(caption, kind.table(records), kind.chart(records))


def _run_table(runs: list[Run]) -> Table:
    columns: Columns = [
        ("run", "{name}"),
        ("mixer", "{mixer}"),
        ("parameters", "{parameters:,}"),
        ("steps", "{steps:,}"),
        ("tokens", "{tokens:,}"),
        ("training loss", lambda run: "diverged" if run["diverged"] else _last_loss(run["training"])),
        ("validation loss", lambda run: _last_loss(run["validation"])),
    ]
    return Table.of(map(vars, runs), columns)


def _last_loss(curve: Curve) -> str:
    return f"{curve[-1][1]:.4f}" if curve else ""


def _charts(runs: list[Run], colours: Mapping[str, str]) -> dict[str, str]:
    """Return charts of the training and the validation losses, of the runs with at least two points."""

    def series(run: Run, curve: Curve) -> Series:
        end = f"{_last_loss(curve)} after {curve[-1][0]:,} steps"
        return Series(curve, colours[run.name], f"{run.name}\n{run.mixer}\n{end}")

    drawn = {
        "training": [series(run, run.training) for run in runs if len(run.training) > 1],
        "validation": [series(run, run.validation) for run in runs if len(run.validation) > 1],
    }
    return {
        split: line_chart(curves, x="step", y=f"{split} loss") for split, curves in drawn.items() if curves
    }
