"""``hypermlp verify``: every statement of the paper that can be computed, measured on the real layer."""

import argparse
import json
import sys

from hypermlp.errors import UserError
from hypermlp.reporting.records import check_writable, write_text
from hypermlp.theory import budget, cost, gap, geometry, lag, learning, memory, mlp, practice  # noqa: F401  (they register)
from hypermlp.theory.check import BASES, CHECKS, Outcome, run

INTRODUCTION = """# The paper's statements, measured

Written by `hypermlp verify --doc docs/theory.md`; each row is also a test (`tests/theory`). Statements of the paper that have
computable content are measured on the real layer: objects (W1, W2, R, slots, measures) are built as matrices from the layer's
parameters (`hypermlp/theory/objects.py`), and the operator that the layer calls is asked for outputs, or, with unit vectors for
values, for its readout weights. float64, D = 16, at most 16 slots, rank 3. A planted mistake in the operator makes checks fail:
`tests/theory/test_statements.py` plants fourteen.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="checks whose name or statement contains one of these words"
    )
    parser.add_argument("--json", choices=("-",), help="print a list of objects instead of a table")
    parser.add_argument("--doc", metavar="FILE", help="write the table with an introduction")


def main(args: argparse.Namespace) -> None:
    if args.doc:
        check_writable(args.doc)
    words = [word.lower() for word in args.only or [""]]
    wanted = [
        found for found in CHECKS if any(word in f"{found.name} {found.statement}".lower() for word in words)
    ]
    if not wanted:
        raise UserError(
            f"no check contains {' or '.join(map(repr, args.only))}; allowed: {', '.join(found.name for found in CHECKS)}"
        )
    outcomes = []
    for number, found in enumerate(wanted, 1):
        outcomes += [run(found, base) for base in found.bases]
        if sys.stderr.isatty():
            print(f"\r{number}/{len(wanted)}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(json.dumps([outcome.to_dict() for outcome in outcomes], indent=2) if args.json else table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if args.doc:
        write_text(args.doc, INTRODUCTION + table(outcomes) + "\n")
    if not args.json:
        print(
            f"\n{len(outcomes) - len(failed)} of {len(outcomes)} passed, {sum(outcome.seconds for outcome in outcomes):.0f} s"
        )
    if failed:
        raise UserError(
            f"{len(failed)} failed: {', '.join(f'{outcome.name} ({outcome.layer})' for outcome in failed)}"
        )


def table(outcomes: list[Outcome]) -> str:
    """Markdown; a statement is one row, with what was measured for each layer."""
    lines = [
        "| statement | in the paper | what is measured | "
        + " | ".join(BASES.values())
        + " | tolerance | verdict |",
        "| --- | --- | --- |" + " ---: |" * len(BASES) + " ---: | --- |",
    ]
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.name, []).append(outcome)
    for group in by_name.values():
        first = group[0]
        measured = {outcome.layer: f"{outcome.measured:.2g}" for outcome in group}
        cells = [
            first.statement,
            first.where,
            first.says,
            *(measured.get(layer, "") for layer in BASES.values()),
        ]
        cells += [
            f"{'≥' if first.at_least else '≤'} {first.tolerance:g}",
            "passed" if all(o.passed for o in group) else "FAILED",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
