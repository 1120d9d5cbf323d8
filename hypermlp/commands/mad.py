"""``hypermlp mad run``, ``compare`` and ``show``."""

import inspect
import json
from pathlib import Path
from typing import Any

from hypermlp.commands.shared import WORKERS, Args, Argument, choices, chosen_workers, command
from hypermlp.errors import UserError
from hypermlp.jobs.cells import run_with_progress
from hypermlp.layers.registry import chosen_mixers
from hypermlp.mad.mixers import check_mixers, identify
from hypermlp.mad.protocol import GRIDS, SWITCHES, MadCell, cells, changed, find_grid
from hypermlp.mad.report import summarize
from hypermlp.mad.tasks import TASKS, find_task, generate
from hypermlp.mad.training import run_cell

SHOWN = 24  # tokens in a line of `mad show`
SWITCH_HELP = {
    "schedule": "of the learning rate",
    "score": "which evaluation counts",
    "accuracy": "mean over classes or positions",
    "precision": "of the training",
}


RUN_OPTIONS = (
    Argument("--task", nargs="+", default=["all"], help="names of tasks, or all (default)"),
    Argument(
        "--grid", default="mini", help=choices({name: grid.about for name, grid in GRIDS.items()}, "mini")
    ),
    Argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the settings, such as num_train=51200, learning_rate=5e-4 or width=64",
    ),
    Argument("--out", default="runs/mad", metavar="FOLDER", help="folder of the results (default: runs/mad)"),
    *WORKERS,
    *(
        Argument(f"--{name}", choices=allowed, help=f"{SWITCH_HELP[name]} (default: the grid's)")
        for name, allowed in SWITCHES.items()
    ),
)


def run(names: list[str], args: Args) -> None:
    """Run the benchmark for the named mixers and print the scores."""
    grid, workers = find_grid(args.grid), chosen_workers(args)
    tasks = list(TASKS) if "all" in args.task else args.task
    switches = {name: getattr(args, name) for name in SWITCHES if getattr(args, name) is not None}
    changes = switches | dict(map(parse_change, args.set))
    wanted: list[MadCell] = []
    for cell in (changed(cell, **changes) for name in names for cell in cells(identify(name), grid, tasks)):
        if cell not in wanted:  # a change can make two cells equal
            wanted.append(cell)
    check_mixers(wanted)
    outcome = run_with_progress(run_cell, wanted, Path(args.out), workers)
    print(summarize(outcome.results))
    with_changes = (
        f", with {', '.join(f'{name} {value}' for name, value in changes.items())}" if changes else ""
    )
    print(f"\nPercent, {args.grid} grid{with_changes}; published values of the full grid in brackets.")
    outcome.raise_if_failed()


def parse_change(change: str) -> tuple[str, Any]:
    """Return the name and value of ``KEY=VALUE``; a value that is not JSON is text."""
    name, equals, value = change.partition("=")
    if not equals:
        raise UserError(f"--set is {change!r}; it must be KEY=VALUE, for example num_train=51200")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@command(
    Argument(
        "--mixer",
        required=True,
        help="a label, such as G-cg-q-12o, a baseline, such as gla, or package.module:function",
    ),
    *RUN_OPTIONS,
)
def run_command(args: Args) -> None:
    run(chosen_mixers([args.mixer]), args)


@command(
    Argument("mixers", nargs="+", help="as for `mad run`; all: ours and every baseline"),
    *RUN_OPTIONS,
)
def compare_command(args: Args) -> None:
    run(chosen_mixers(args.mixers), args)


@command(
    Argument("task", nargs="?", default="", help=", ".join(TASKS)),
    Argument("--split", default="test", choices=("train", "test"), help="default: test"),
)
def show_command(args: Args) -> None:
    task = find_task(args.task)
    print(inspect.getdoc(task.make))
    baseline = ", ".join(f"{name} {getattr(task.baseline, name)}" for name in task.changes)
    print(f"\ndefault settings: {baseline}\n")
    print(f"an example of the {args.split} split, targets below inputs, - where nothing is scored:\n")
    example = generate(args.task, split=args.split, num_train=1, num_test=1)
    inputs, targets = (part[0].tolist() for part in example)
    for first in range(0, len(inputs), SHOWN):
        for tokens in (inputs, targets):
            shown = (token if token >= 0 else "-" for token in tokens[first : first + SHOWN])
            print(" ".join(f"{token:>3}" for token in shown))
        print()
