"""``hypermlp study run``, ``tune``, ``report``, ``figure`` and ``scale``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypermlp.commands.shared import WORKERS, Args, Argument, choices, chosen_workers, command
from hypermlp.files import write_text
from hypermlp.jobs.cells import run_with_progress
from hypermlp.mad.mixers import check_mixers
from hypermlp.mad.report import summarize
from hypermlp.mad.training import run_cell
from hypermlp.reporting.records import write_record
from hypermlp.study import report, scale, scale_report
from hypermlp.study.figures import write_curves, write_scaling
from hypermlp.study.lm import run_lm, tune_and_run
from hypermlp.study.protocol import SIZES, TUNING_ROWS, find_rows, find_size, tuning_cells
from hypermlp.study.reading import read_study
from hypermlp.study.tables import losses_table
from hypermlp.study.tuning import tuning_table

COLUMNS = ("lm", "mad")
RECORDED = (
    Argument("folder", help="folder of the records that `hypermlp study run` wrote"),
    Argument("--size", help="size to report (default: the one with the most of the recorded cells)"),
)


def common_options(folder: str) -> tuple[Argument, ...]:
    sizes = choices({name: size.about for name, size in SIZES.items()}, "mini")
    return (
        Argument("--size", default="mini", help=sizes),
        Argument(
            "--out",
            metavar="FOLDER",
            help=f"folder of the results, one JSON record per training (default: {folder})",
        ),
        *WORKERS,
    )


@command(
    Argument(
        "--labels", nargs="+", default=["all"], help="labels or baselines, or all rows of the size (default)"
    ),
    Argument(
        "--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS, help="what to run (default: both)"
    ),
    *common_options("runs/study-SIZE"),
)
def run_command(args: Args) -> None:
    size, workers = find_size(args.size), chosen_workers(args)
    rows = find_rows(args.labels, size)
    folder = Path(args.out or f"runs/study-{args.size}")
    on_mad = [cell for row in rows for cell in size.mad_cells(row)] if "mad" in args.columns else []
    check_mixers(on_mad)
    outcomes = []
    if "lm" in args.columns:
        outcomes.append(tune_and_run(size, rows, folder, workers))
        trained = ((asdict(cell), result) for cell, result in outcomes[-1].results)
        print(losses_table(trained).markdown(), end="\n\n")
    if on_mad:
        outcomes.append(run_with_progress(run_cell, on_mad, folder / "mad", workers))
        print(summarize(outcomes[-1].results).table().markdown(), end="\n\n")
    for outcome in outcomes:
        outcome.raise_if_failed()
    print(f"`hypermlp study report {folder}` makes a page of the results")


@command(
    Argument(
        "--labels",
        nargs="+",
        default=TUNING_ROWS,
        help=f"labels to tune (default: {' '.join(TUNING_ROWS)}, which the tested claims do not compare)",
    ),
    *common_options("runs/study-SIZE-tuning"),
)
def tune_command(args: Args) -> None:
    folder = Path(args.out or f"runs/study-{args.size}-tuning")
    size = find_size(args.size)
    outcome = run_lm(list(tuning_cells(size, find_rows(args.labels, size))), folder, chosen_workers(args))
    outcome.raise_if_failed()
    print(tuning_table(outcome.results).markdown())


@command(
    *RECORDED,
    Argument(
        "--against", metavar="FOLDER", help="compare with these records, such as docs/results/study-mini"
    ),
    Argument("--title", default="HyperMLP: the design study", help="title of the page"),
    Argument(
        "--out",
        metavar="FOLDER",
        help="folder for index.html, table.md, summary.json (default: the records')",
    ),
)
def report_command(args: Args) -> None:
    study = read_study(Path(args.folder), find_size(args.size) if args.size else None)
    comparison = report.compare(study, read_study(Path(args.against))) if args.against else None
    folder = Path(args.out or args.folder)
    page, markdown = report.page(study, args.title, comparison), report.markdown(study)
    _write(folder, page, markdown, report.summary(study))
    if comparison:
        print(f"compared with {args.against}: {comparison}")
    print(f"wrote {folder / 'index.html'}, table.md and summary.json")


def _write(folder: Path, page: str, markdown: str, summary: dict[str, Any]) -> None:
    """Write the three files of a report, and print its tables."""
    write_text(folder / "index.html", page)
    write_text(folder / "table.md", markdown)
    write_record(folder / "summary.json", summary)
    print(markdown)


@command(
    *RECORDED,
    Argument(
        "--out", metavar="PATH", help="path without its ending (default: curves in the records' folder)"
    ),
)
def figure_command(args: Args) -> None:
    study = read_study(Path(args.folder), find_size(args.size) if args.size else None)
    for path in write_curves(study, Path(args.out or f"{args.folder}/curves")):
        print(f"wrote {path}")


@command(
    Argument("--plan", default="full", choices=scale.PLANS, help="smoke: seconds, for tests"),
    Argument(
        "--points",
        nargs="+",
        default=[],
        help=f"sizes: {', '.join(scale.PLANS['full'])} (default: those whose rates are tuned)",
    ),
    Argument("--out", default="runs/scale", metavar="FOLDER", help="default: runs/scale"),
    Argument(
        "--headline",
        default="docs/results/headline",
        metavar="FOLDER",
        help="records of `hypermlp study run --size headline` (default: docs/results/headline)",
    ),
    Argument("--report", action="store_true", help="train nothing, report what is recorded"),
    *WORKERS,
)
def scale_command(args: Args) -> None:
    points, folder, headline = scale.find_points(args.plan, args.points), Path(args.out), Path(args.headline)
    if not args.report:
        for outcome in scale.run_scale(points, folder, headline, chosen_workers(args)):
            outcome.raise_if_failed()
    found = scale.read_scale(points, folder, headline)
    page = scale_report.page(found, "HyperMLP: loss against size")
    figures = list(write_scaling(found, folder / "scaling"))
    _write(folder, page, scale_report.markdown(found), scale_report.summary(found))
    print(f"wrote {', '.join(map(str, figures))}, index.html, table.md and summary.json")
