"""The results page: loss curves of runs, and tables of records of any kind."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hypermlp.errors import UserError
from hypermlp.reporting.charts import Series, line_chart
from hypermlp.reporting.page import COLOURS, Figure, Section, report_page
from hypermlp.reporting.sources import Curve, Record, Run, Sources
from hypermlp.reporting.table import Columns, Table

Records = list[Record]
HOW_TO_READ = "Point at a curve, or move between curves with the Tab key."


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
    for name in sorted(found.records.keys() - kinds.keys()):
        reason = f"records of kind {name!r} have no table"
        found.problems += [f"{record.path}: {reason}" for record in found.records[name]]
    sections = [_runs(found.runs)] if found.runs else []
    for name, kind in kinds.items():
        sections += _sections(kind, found.records.get(name, []), found.problems)
    if not sections:
        raise UserError("there is nothing to show: " + "; ".join(found.problems))
    left_out = [Section("Left out", items=found.problems)] if found.problems else []
    return report_page(title, [*sections, *left_out])


def _sections(kind: Kind, records: Records, problems: list[str]) -> list[Section]:
    """Return a section for each table of a kind; the first one has the title of the kind."""
    groups: dict[str, Records] = defaultdict(list)
    for record in records:
        try:
            _section(kind, [record])  # alone: one damaged record must not hide its group
            groups[kind.group(record)].append(record)
        except Exception as error:  # a damaged record may fail in any way
            problems.append(f"{record.path}: not as its kind should be ({type(error).__name__}: {error})")
    sections = [_section(kind, group) for group in groups.values()]
    return [section._replace(title="" if index else kind.title) for index, section in enumerate(sections)]


def _section(kind: Kind, records: Records) -> Section:
    """Return the table, with its file or number of records, its days and its processors in the note."""
    contents = [record.content for record in records]
    days = sorted({str(each.get("created", ""))[:10] for each in contents})
    machines = sorted({str((each.get("machine") or {}).get("processor", "")) for each in contents})
    files = str(records[0].path) if len(records) == 1 else f"{len(records)} records"
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    note = f"{kind.about(records)}. {files}, {period}, {', '.join(machines)}."
    chart = kind.chart(records)
    return Section(
        note=note, figures=[Figure(chart, HOW_TO_READ)] if chart else (), table=kind.table(records)
    )


def _runs(runs: list[Run]) -> Section:
    """Return the losses of the runs, with curves of those that have at least two points."""
    columns: Columns = [
        ("run", "{name}"),
        ("mixer", "{mixer}"),
        ("parameters", "{parameters:,}"),
        ("steps", "{steps:,}"),
        ("tokens", "{tokens:,}"),
        ("training loss", lambda run: "diverged" if run["diverged"] else _last_loss(run["training"])),
        ("validation loss", lambda run: _last_loss(run["validation"])),
    ]
    colours = {run.name: f"c{index % COLOURS}" for index, run in enumerate(runs)}
    figures = []
    for split in ("training", "validation"):
        curves = [(run, getattr(run, split)) for run in runs if len(getattr(run, split)) > 1]
        series = [
            Series(
                curve,
                colours[run.name],
                f"{run.name}\n{run.mixer}\n{_last_loss(curve)} after {curve[-1][0]:,} steps",
            )
            for run, curve in curves
        ]
        if series:
            chart = line_chart(series, x="step", y=f"{split} loss")
            figures.append(Figure(chart, f"The {split} loss. {HOW_TO_READ}", colours))
    return Section("Training", figures=figures, table=Table.of(map(vars, runs), columns))


def _last_loss(curve: Curve) -> str:
    return f"{curve[-1][1]:.4f}" if curve else ""
