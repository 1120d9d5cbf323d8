"""What several commands share: how a command is declared, common arguments, checks and records."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hypermlp.errors import UserError, first_line
from hypermlp.files import check_writable
from hypermlp.jobs.workers import Cluster, Local, Workers
from hypermlp.reporting.records import new_record, write_record
from hypermlp.validation import LARGEST_SIZE

Args = argparse.Namespace
"""The parsed arguments of a command."""
Main = Callable[[Args], None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Argument:
    """An argument of a command, given as to ``argparse.ArgumentParser.add_argument``.

    The help ends with the default, unless it describes the default itself. With ``least``, the argument is an
    integer, and this is the smallest that is allowed.
    """

    def __init__(self, *names: str, least: int | None = None, **settings: Any):
        if least is not None:
            settings["type"] = int
        default = settings.get("default")
        if default not in (None, "", []) and "default" not in settings["help"]:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            settings["help"] += f" (default: {shown})"
        self.names, self.least, self.settings = names, least, settings

    def check(self, args: Args) -> None:
        """Raise UserError if the number was given and is below ``least`` or above LARGEST_SIZE."""
        if self.least is None:
            return
        value = getattr(args, self.names[0].removeprefix("--").replace("-", "_"))
        if value is not None and not self.least <= value <= LARGEST_SIZE:
            bound = f"at least {self.least}" if value < self.least else f"at most {LARGEST_SIZE:,}"
            raise UserError(f"{self.names[0]} is {value}; it must be {bound}")


class Implementation(NamedTuple):
    """A command's arguments, in the order of its help, and the function that runs it."""

    arguments: tuple[Argument, ...]
    main: Main


def command(*arguments: Argument) -> Callable[[Main], Implementation]:
    """Return a decorator that makes a function the implementation of a command with these arguments.

    The function is called after every number was compared with its ``least``. Example::

        @command(Argument("--force", action="store_true", help="build even if the library exists"))
        def main(args): ...
    """

    def implement(main: Main) -> Implementation:
        def checked(args: Args) -> None:
            for argument in arguments:
                argument.check(args)
            main(args)

        return Implementation(arguments, checked)

    return implement


CHECKPOINT = Argument(
    "checkpoint",
    help="a folder with a model, a run of `hypermlp train`, or a model in the package: tiny, tiny-softmax",
)
ON_DEVICE = Argument("--device", default=DEVICE, help=f"cpu, cuda:0, ... (default here: {DEVICE})")
SET = Argument(
    "--set",
    action="append",
    default=[],
    metavar="KEY=VALUE",
    help="change a key of the recipe, such as training.steps=100; may be repeated",
)
VOCAB = Argument("--vocab", type=int, help="size of the tokenizer, if its name does not determine it")
PRINT_JSON = Argument("--json", nargs="?", const="-", choices=("-",), help="print JSON instead of a table")
WORKERS = (  # where trainings run, and with how many threads and GPUs
    Argument("--jobs", type=int, default=1, help="trainings that run at once"),
    Argument("--threads", type=int, help="threads of each training (default: cores / --jobs)"),
    Argument("--device", default="cpu", help="device on this machine"),
    Argument(
        "--cluster",
        metavar="ADDRESS",
        nargs="?",
        const="auto",
        help="run on a Ray cluster, not on this machine",
    ),
    Argument("--gpus", type=float, default=0, help="GPUs of each training there"),
)


def read_prompt(prompt: str, *, files: bool = False) -> str:
    """Return the text of a prompt: "-" stands for standard input and, with ``files``, "@FILE" for a file."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        text = Path(prompt[1:]).read_bytes().decode() if files and prompt.startswith("@") else prompt
        text.encode()  # an argument may hold bytes that are not text
    except UnicodeError as error:
        raise UserError(f"the prompt is not UTF-8: {error}; convert it to UTF-8 first") from error
    return text


def choices(about: dict[str, str], default: str) -> str:
    """Return a help text that lists named choices with their descriptions."""
    return "; ".join(f"{name}{' (default)' * (name == default)} = {text}" for name, text in about.items())


def check_device(name: str) -> None:
    """Raise UserError if tensors on this device cannot be made and read back."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device is {name!r}, which is not usable here: {first_line(error)}") from error


def chosen_workers(args: Args) -> Workers:
    """Return the workers that the arguments WORKERS describe."""
    if args.jobs < 1 or (args.threads is not None and args.threads < 1):
        raise UserError(f"--jobs is {args.jobs}, --threads is {args.threads}; both must be 1 or more")
    if args.gpus < 0 or (args.gpus and not args.cluster):
        raise UserError(f"--gpus is {args.gpus}; it must be 0 or more, and needs --cluster")
    check_device(args.device)
    if args.cluster:
        return Cluster(address=args.cluster, threads=args.threads or 1, gpus=args.gpus)
    return Local(jobs=args.jobs, threads=args.threads, device=args.device)


def measuring(
    *, rounds: int, seconds: float, least_rounds: int = 1, json_help: str = "write the results to a record"
) -> tuple[Argument, ...]:
    """Return the arguments of a measurement, with these defaults, and ``--json``."""
    return (
        Argument(
            "--rounds", least=least_rounds, default=rounds, help="largest number of timings of each kind"
        ),
        Argument(
            "--seconds", type=float, default=seconds, help="stop a series of timings after this many seconds"
        ),
        Argument("--json", metavar="FILE", help=json_help),
    )


def require_measuring(args: Args) -> None:
    """Check the time and the record of ``measuring``."""
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds is {args.seconds}; it must be positive and finite")
    require_writable(args.json)


def require_writable(path: str | None) -> None:
    """Raise if the path of a record is given and cannot be written."""
    if path == "-":
        raise UserError("--json is '-'; give the path of a file for the record")
    if path:
        check_writable(path)


def save_record(path: str | None, kind: str, settings: dict[str, Any], results: Any) -> None:
    """Write a record and print its path; without a path, do nothing."""
    if path:
        write_record(path, new_record(kind, settings, results))
        print(f"record: {path}")
