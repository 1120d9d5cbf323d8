"""``hypermlp mad run``, ``compare`` and ``show``."""

import argparse
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from hypermlp.errors import UserError
from hypermlp.jobs import workers
from hypermlp.jobs.cells import run_and_tell
from hypermlp.layers.registry import chosen_mixers
from hypermlp.mad.mixers import identify
from hypermlp.mad.protocol import (
    ACCURACIES,
    GRIDS,
    PRECISIONS,
    SCHEDULES,
    SCORES,
    Cell,
    cells,
    changed,
    find_grid,
)
from hypermlp.mad.report import summarize
from hypermlp.mad.run import check_mixers
from hypermlp.mad.tasks import TASKS, find_task, generate
from hypermlp.mad.training import work

SWITCHES = {"schedule": SCHEDULES, "score": SCORES, "accuracy": ACCURACIES, "precision": PRECISIONS}


def add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", nargs="+", default=["all"], help="names of tasks, or all (default)")
    parser.add_argument(
        "--grid", default="mini", help="; ".join(f"{name}: {grid.about}" for name, grid in GRIDS.items())
    )
    example = "such as num_train=51200, learning_rate=5e-4 or width=64"
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"change every cell, {example}"
    )
    parser.add_argument(
        "--out", default="runs/mad", metavar="FOLDER", help="where records go (default: runs/mad)"
    )
    workers.add_arguments(parser)
    for name, allowed in SWITCHES.items():
        parser.add_argument(f"--{name}", choices=allowed, help="default: the grid's; see docs/mad.md")


def run(names: list[str], args: argparse.Namespace) -> None:
    grid = find_grid(args.grid)
    tasks = list(TASKS) if "all" in args.task else args.task
    switches: dict[str, Any] = {
        name: getattr(args, name) for name in SWITCHES if getattr(args, name) is not None
    }
    changes = switches | dict(map(parse, args.set))
    wanted: list[Cell] = []
    for cell in (changed(cell, **changes) for name in names for cell in cells(identify(name), grid, tasks)):
        if cell not in wanted:  # where a change makes two cells equal
            wanted.append(cell)
    where = workers.chosen(args)
    check_mixers(wanted)
    outcome = run_and_tell(work, wanted, Path(args.out), where)
    print(summarize(sorted(outcome.results, key=lambda result: wanted.index(result[0]))))
    changed_too = (
        f", with {', '.join(f'{name} {value}' for name, value in changes.items())}" if changes else ""
    )
    print(
        f"\nPercent, {args.grid} grid{changed_too}; in brackets published values, which are of the full one."
    )
    outcome.complain()


def parse(change: str) -> tuple[str, Any]:
    name, equals, value = change.partition("=")
    if not equals:
        raise UserError(f"--set is {change!r}; it must be KEY=VALUE, for example num_train=51200")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


class RunCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--mixer",
            required=True,
            help="a label, such as G-cg-q-12o, a peer, such as gla, or package.module:function",
        )
        add_running(parser)

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        run([args.mixer], args)


class CompareCommand:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("mixers", nargs="+", help="as for `mad run`; or all: ours and every peer")
        add_running(parser)

    @staticmethod
    def main(args: argparse.Namespace) -> None:
        run(chosen_mixers(args.mixers), args)


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
        baseline = ", ".join(f"{name} {getattr(task.baseline, name)}" for name in task.changes)
        print(
            f"\nbaseline: {baseline}\n\nan example of the {args.split} split, target below input, - where nothing is asked:\n"
        )
        for first in range(0, inputs.shape[1], 24):
            part = slice(first, first + 24)
            print(" ".join(f"{token:3}" for token in inputs[0, part]))
            print(
                " ".join(f"{token:3}" if token >= 0 else "  -" for token in np.asarray(targets[0, part]))
                + "\n"
            )
