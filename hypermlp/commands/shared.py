"""Arguments, checks and output that several commands share."""

import argparse
import math
from typing import Any

from hypermlp.errors import UserError
from hypermlp.reporting.records import check_writable, new_record, write_record


def add_measuring(
    parser: argparse.ArgumentParser,
    *,
    rounds: int,
    seconds: float,
    json_help: str = "write the results to a record",
) -> None:
    """Add ``--rounds`` and ``--seconds`` with these defaults, and ``--json``."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"time each work at most so often (default: {rounds})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"stop a series of rounds after so many seconds (default: {seconds:g})",
    )
    parser.add_argument("--json", metavar="FILE", help=json_help)


def require_at_least(args: argparse.Namespace, **minimums: int) -> None:
    """Raise UserError if an argument is below its minimum; an argument that is None was not given."""
    for name, minimum in minimums.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")


def require_measuring(args: argparse.Namespace, *, rounds: int) -> None:
    """Check the arguments of ``add_measuring``, with ``rounds`` as the minimum of ``--rounds``."""
    require_at_least(args, rounds=rounds)
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds is {args.seconds}; it must be positive and finite")
    require_writable(args.json)


def require_writable(path: str | None) -> None:
    """Raise if a record was asked for and cannot be written."""
    if path == "-":
        raise UserError("--json is '-'; give the path of a file for the record")
    if path:
        check_writable(path)


def save_record(path: str | None, kind: str, settings: dict[str, Any], results: Any) -> None:
    """Write a record and print its path, if one was asked for."""
    if path:
        write_record(path, new_record(kind, settings, results))
        print(f"record: {path}")
