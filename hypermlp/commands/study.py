"""``hypermlp study run``, ``tune`` and ``report``."""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hypermlp import mad
from hypermlp.jobs import workers
from hypermlp.jobs.cells import Outcome, run_and_tell, tell_people
from hypermlp.mad.protocol import cells, find_grid
from hypermlp.mad.run import check_mixers
from hypermlp.mad.training import work as mad_work
from hypermlp.reporting.records import write_record, write_text
from hypermlp.study import report
from hypermlp.study.claims import CLAIMED
from hypermlp.study.lm import RUNNING
from hypermlp.study.lm import work as lm_work
from hypermlp.study.protocol import (
    SIZES,
    TUNING_ROWS,
    LmCell,
    Size,
    find_rows,
    find_size,
    lm_cells,
    tuning_cells,
)
from hypermlp.study.summary import read_study, summary
from hypermlp.study.tuning import loss_of, tuned_rates
from hypermlp.train.data import prepare
from hypermlp.train.recipe import Recipe, build

COLUMNS = ("lm", "mad")


def add_common(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument(
        "--size", default="mini", help="; ".join(f"{name}: {size.about}" for name, size in SIZES.items())
    )
    parser.add_argument("--out", metavar="FOLDER", help=f"where records go (default: {folder})")
    workers.add_arguments(parser)


def run_lm(
    wanted: list[Any], folder: Path, where: workers.Local | workers.Cluster, *, evaluate: bool = False
) -> Outcome:
    recipe: Recipe = build(Recipe, wanted[0].recipe, "")
    prepare(recipe.data)  # once, before many ask for it
    outcome = run_and_tell(
        partial(lm_work, folder=folder.absolute(), evaluate=evaluate), wanted, folder, where
    )
    running = folder / RUNNING / "lm"
    if running.is_dir() and not any(running.iterdir()):
        running.rmdir()
        running.parent.rmdir()
    return outcome


def tune_and_run(
    size: Size, rows: list[str], folder: Path, where: workers.Local | workers.Cluster
) -> Outcome:
    """Choose every row's learning rate, then train the reported models."""

    def train(wanted: list[LmCell]) -> list[tuple[LmCell, dict[str, Any]]]:
        outcome = run_lm(wanted, folder, where)
        outcome.complain()
        return outcome.results

    rates = tuned_rates(size, rows, train)
    if rates:
        tell_people("learning rates: " + ", ".join(f"{row} {rate:g}" for row, rate in rates.items()))
    return run_lm(list(lm_cells(size, rows, CLAIMED, rates)), folder, where, evaluate=size.evaluate)


class RunCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--labels", nargs="+", default=["all"], help="rows, or all (default)")
        parser.add_argument(
            "--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS, help="default: both"
        )
        add_common(parser, "runs/study-SIZE")

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        size = find_size(args.size)
        rows = find_rows(args.labels, size)
        folder = Path(args.out or f"runs/study-{args.size}")
        where = workers.chosen(args)
        tasks = list(size.mad_tasks or mad.TASKS)
        with_mad = "mad" in args.columns and bool(size.mad)
        on_mad = [cell for row in rows for cell in cells(row, find_grid(size.mad), tasks)] if with_mad else []
        check_mixers(on_mad)
        outcomes = []
        if "lm" in args.columns:
            outcomes.append(tune_and_run(size, rows, folder, where))
        if with_mad:
            outcomes.append(run_and_tell(mad_work, on_mad, folder / "mad", where))
        for outcome in outcomes:
            outcome.complain()
        print(f"`hypermlp study report {folder}` makes a page of it")


class TuneCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--labels",
            nargs="+",
            default=TUNING_ROWS,
            help=f"rows (default: {' '.join(TUNING_ROWS)}, which no claim uses)",
        )
        add_common(parser, "runs/study-SIZE-tuning")

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        folder = Path(args.out or f"runs/study-{args.size}-tuning")
        size = find_size(args.size)
        wanted = list(tuning_cells(size, find_rows(args.labels, size)))
        outcome = run_lm(wanted, folder, workers.chosen(args))
        outcome.complain()
        print(
            tuning_table(tuning_losses(sorted(outcome.results, key=lambda result: wanted.index(result[0]))))
        )


def tuning_losses(results: Iterable[tuple[LmCell, dict[str, Any]]]) -> dict[float, dict[str, float]]:
    """Of every row, by learning rate."""
    losses: dict[float, dict[str, float]] = defaultdict(dict)
    for cell, result in results:
        losses[cell.rate][cell.mixer] = loss_of(result)
    return dict(sorted(losses.items()))


def tuning_table(losses: dict[float, dict[str, float]]) -> str:
    """Markdown."""
    rows = list(next(iter(losses.values())))
    lines = ["| learning rate | " + " | ".join(rows) + " | mean |", "| ---: |" + " ---: |" * (len(rows) + 1)]
    for rate, found in losses.items():
        cells = [f"{found[row]:.4f}" for row in rows] + [f"{statistics.fmean(found.values()):.4f}"]
        lines.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class ReportCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", help="of records that `hypermlp study run` wrote")
        parser.add_argument(
            "--against",
            metavar="FOLDER",
            help="compare with the records there, such as docs/results/study-mini",
        )
        parser.add_argument("--title", default="HyperMLP: the design study", help="of the page")
        parser.add_argument(
            "--out",
            metavar="FOLDER",
            help="where index.html, table.md and summary.json go (default: beside the records)",
        )

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        folder = Path(args.folder)
        study = read_study(folder)
        comparison = report.compare(study, read_study(Path(args.against))) if args.against else None
        folder = Path(args.out) if args.out else folder
        write_text(folder / "index.html", report.page(study, args.title, comparison))
        write_text(folder / "table.md", report.markdown(study))
        write_record(folder / "summary.json", summary(study))
        print(report.markdown(study))
        if comparison:
            print(f"against {args.against}: {comparison}")
        print(f"wrote {folder / 'index.html'}, table.md and summary.json")
