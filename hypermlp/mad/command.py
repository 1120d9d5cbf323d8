"""``hypermlp mad run``, ``compare`` and ``show``."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np

from hypermlp.mad.protocol import ACCURACIES, GRIDS, PRECISIONS, SCHEDULES, SCORES, Cell, cells, find_grid
from hypermlp.mad.report import Table, summarize
from hypermlp.mad.run import recorded, run_cells
from hypermlp.mad.tasks import TASKS, find_task, generate
from hypermlp.mad.training import Progress
from hypermlp.mad.workers import CellError, Cluster, Local

SWITCHES = {"schedule": SCHEDULES, "score": SCORES, "accuracy": ACCURACIES, "precision": PRECISIONS}


def add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", nargs="+", default=["all"], help="names of tasks, or all (default)")
    parser.add_argument("--grid", default="mini", help="; ".join(f"{name}: {grid.about}" for name, grid in GRIDS.items()))
    parser.add_argument("--out", default="runs/mad", metavar="FOLDER", help="where records go (default: runs/mad)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, in processes (default: 1)")
    parser.add_argument("--threads", type=int, help="of each process (default: the cores, shared)")
    parser.add_argument("--cluster", metavar="ADDRESS", nargs="?", const="auto", help="run on a Ray cluster instead")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each cell on the cluster (default: 0)")
    parser.add_argument("--device", default="cpu", help="of local processes (default: cpu)")
    for name, allowed in SWITCHES.items():
        parser.add_argument(f"--{name}", choices=allowed, help="default: the grid's; docs/mad.md says what was published")


def run(mixers: list[str], args: argparse.Namespace) -> Table:
    grid = find_grid(args.grid)
    tasks = list(TASKS) if args.task == ["all"] else args.task
    if args.jobs < 1 or (args.threads is not None and args.threads < 1):
        raise ValueError(f"--jobs is {args.jobs}, --threads {args.threads}; they must be at least 1")
    switches: dict[str, Any] = {name: getattr(args, name) for name in SWITCHES if getattr(args, name) is not None}
    wanted = [cell for mixer in mixers for cell in cells(mixer, grid, tasks, **switches)]
    where: Local | Cluster
    if args.cluster:
        where = Cluster(address=args.cluster, threads=args.threads or 1, gpus=args.gpus)
    else:
        where = Local(jobs=args.jobs, threads=args.threads, device=args.device)
    folder = Path(args.out)
    known = sum(recorded(folder, cell) is not None for cell in wanted)
    print(f"{len(wanted)} cells, {known} of them recorded in {folder}", flush=True)
    teller, results = Teller(len(wanted) - known), []
    try:
        for cell, result in run_cells(wanted, folder, where, tell=teller.progress):
            results.append((cell, result))
            if len(results) > known:
                teller.done(cell, result)
    except CellError as error:
        raise ValueError(error) from error
    return summarize(results)


class Teller:
    """Accuracy so far, and time left, as far as the cells that are done tell."""

    def __init__(self, cells: int):
        self.cells, self.finished = cells, 0
        self.began = self.told = time.monotonic()

    def progress(self, cell: Cell, progress: Progress) -> None:
        if time.monotonic() - self.told < 5:
            return
        self.told = time.monotonic()
        left = progress.seconds * (progress.steps / progress.step - 1)
        at = f"step {progress.step}/{progress.steps}, {progress.accuracy:.1%}"
        print(f"  {cell.mixer} {cell.task}: {at}, at most {left:.0f} s left of this cell", file=sys.stderr, flush=True)

    def done(self, cell: Cell, result: dict[str, Any]) -> None:
        self.finished += 1
        left = (time.monotonic() - self.began) / self.finished * (self.cells - self.finished)
        what = f"{cell.mixer} {cell.task}: {result['score']:.1%} after {result['steps']} steps, {result['seconds']:.0f} s"
        print(f"[{self.finished}/{self.cells}] {what}; about {left / 60:.0f} min left", flush=True)


class RunCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mixer", required=True, help="a label, such as G-cg-q-12o, or package.module:function")
        add_running(parser)

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        print(run([args.mixer], args))


class CompareCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("mixers", nargs="+", help="labels, or package.module:function")
        add_running(parser)

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        print(run(args.mixers, args))


class ShowCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("task", help=", ".join(TASKS))
        parser.add_argument("--split", default="test", choices=("train", "test"), help="default: test")

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        task = find_task(args.task)
        print(textwrap.dedent("    " + inspect.getdoc(task.make).replace("\n", "\n    ")))  # type: ignore[union-attr]
        inputs, targets = generate(args.task, split=args.split, num_train=1, num_test=1)
        print(f"\nbaseline {task.baseline}\n\nan example of the {args.split} split, target below input, - where nothing is asked:\n")
        for first in range(0, inputs.shape[1], 24):
            part = slice(first, first + 24)
            print(" ".join(f"{token:3}" for token in inputs[0, part]))
            print(" ".join(f"{token:3}" if token >= 0 else "  -" for token in np.asarray(targets[0, part])) + "\n")
