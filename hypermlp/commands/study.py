"""``hypermlp study run``, ``tune``, ``report``, ``figure`` and ``scale``."""

import argparse
from pathlib import Path

from hypermlp.commands.options import add_worker_options, chosen_workers
from hypermlp.jobs.cells import run_with_progress
from hypermlp.mad.mixers import check_mixers
from hypermlp.mad.protocol import cells, find_grid
from hypermlp.mad.tasks import TASKS
from hypermlp.mad.training import work
from hypermlp.reporting.records import write_record, write_text
from hypermlp.study import report, scale, scale_report
from hypermlp.study.figures import write_curves
from hypermlp.study.lm import run_lm, tune_and_run
from hypermlp.study.protocol import SIZES, TUNING_ROWS, find_rows, find_size, tuning_cells
from hypermlp.study.summary import read_study, summary
from hypermlp.study.tuning import tuning_table

COLUMNS = ("lm", "mad")


def add_common_options(parser: argparse.ArgumentParser, folder: str) -> None:
    sizes = "; ".join(f"{name}: {size.about}" for name, size in SIZES.items())
    parser.add_argument("--size", default="mini", help=sizes)
    parser.add_argument("--out", metavar="FOLDER", help=f"folder of the records (default: {folder})")
    add_worker_options(parser)


class RunCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--labels",
            nargs="+",
            default=["all"],
            help="labels or baselines, or all rows of the size (default)",
        )
        parser.add_argument(
            "--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS, help="what to run (default: both)"
        )
        add_common_options(parser, "runs/study-SIZE")

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        size, workers = find_size(args.size), chosen_workers(args)
        rows = find_rows(args.labels, size)
        folder = Path(args.out or f"runs/study-{args.size}")
        tasks = list(size.mad_tasks or TASKS)
        on_mad = [
            cell
            for row in rows
            if "mad" in args.columns and size.mad
            for cell in cells(row, find_grid(size.mad), tasks)
        ]
        check_mixers(on_mad)
        outcomes = []
        if "lm" in args.columns:
            outcomes.append(tune_and_run(size, rows, folder, workers))
        if on_mad:
            outcomes.append(run_with_progress(work, on_mad, folder / "mad", workers))
        for outcome in outcomes:
            outcome.raise_if_failed()
        print(f"`hypermlp study report {folder}` makes a page of the results")


class TuneCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        default = f"rows (default: {' '.join(TUNING_ROWS)}, which no claim uses)"
        parser.add_argument("--labels", nargs="+", default=TUNING_ROWS, help=default)
        add_common_options(parser, "runs/study-SIZE-tuning")

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        folder = Path(args.out or f"runs/study-{args.size}-tuning")
        size = find_size(args.size)
        outcome = run_lm(list(tuning_cells(size, find_rows(args.labels, size))), folder, chosen_workers(args))
        outcome.raise_if_failed()
        print(tuning_table(outcome.results).markdown())


class ReportCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", help="folder of the records that `hypermlp study run` wrote")
        parser.add_argument(
            "--against", metavar="FOLDER", help="compare with these records, such as docs/results/study-mini"
        )
        parser.add_argument("--title", default="HyperMLP: the design study", help="title of the page")
        parser.add_argument(
            "--out",
            metavar="FOLDER",
            help="folder for index.html, table.md, summary.json (default: the records')",
        )

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        study = read_study(Path(args.folder))
        comparison = report.compare(study, read_study(Path(args.against))) if args.against else None
        folder = Path(args.out or args.folder)
        write_text(folder / "index.html", report.page(study, args.title, comparison))
        write_text(folder / "table.md", report.markdown(study))
        write_record(folder / "summary.json", summary(study))
        print(report.markdown(study))
        if comparison:
            print(f"compared with {args.against}: {comparison}")
        print(f"wrote {folder / 'index.html'}, table.md and summary.json")


class FigureCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", help="folder of the records that `hypermlp study run` wrote")
        parser.add_argument(
            "--out", metavar="PATH", help="path without its ending (default: curves in the records' folder)"
        )

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        study = read_study(Path(args.folder))
        for path in write_curves(study, Path(args.out or f"{args.folder}/curves")):
            print(f"wrote {path}")


class ScaleCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plan", default="full", choices=scale.PLANS, help="smoke: seconds, for tests")
        parser.add_argument(
            "--points", nargs="+", default=[], help="sizes by name (default: those with tuned rates)"
        )
        parser.add_argument("--out", default="runs/scale", metavar="FOLDER", help="default: runs/scale")
        parser.add_argument(
            "--headline",
            default="docs/results/headline",
            metavar="FOLDER",
            help="records of `hypermlp study run --size headline` (default: docs/results/headline)",
        )
        parser.add_argument("--report", action="store_true", help="train nothing, report what is recorded")
        add_worker_options(parser)

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        points, folder, headline = (
            scale.find_points(args.plan, args.points),
            Path(args.out),
            Path(args.headline),
        )
        if not args.report:
            for outcome in scale.run_scale(points, folder, headline, chosen_workers(args)):
                outcome.raise_if_failed()
        found = scale.read_scale(points, folder, headline)
        write_text(folder / "index.html", scale_report.page(found, points, "HyperMLP: loss against size"))
        write_text(folder / "table.md", scale_report.markdown(found, points))
        write_record(folder / "summary.json", scale_report.summary(found))
        figures = list(scale_report.write_figure(found, folder / "scaling"))
        print(scale_report.markdown(found, points))
        print(f"wrote {', '.join(map(str, figures))}, index.html, table.md and summary.json")
