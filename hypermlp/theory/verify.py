"""All checks in reading order, and their outcomes as a table."""

import sys

from hypermlp.errors import UserError
from hypermlp.reporting.table import Table
from hypermlp.theory import cost, gap, geometry, lag, learning, memory, mlp, practice
from hypermlp.theory.check import BASES, Check, Outcome

FILES = (mlp, lag, memory, geometry, gap, practice, learning, cost)
CHECKS = [check for file in FILES for check in vars(file).values() if isinstance(check, Check)]

INTRODUCTION = """# The paper's statements, measured

`hypermlp verify --doc docs/theory.md` writes this file. Each row is also a test (`tests/theory`).

Every statement of the paper that can be computed is measured on the real layer. The paper's objects (W1, W2,
R, slots, measures) are built as matrices from the layer's parameters (`hypermlp/theory/objects.py`). They are
compared with the operator's outputs, or with its readout weights, which are its outputs for unit vectors as
values. All numbers are float64 with D = 16, at most 16 slots and rank 3. `tests/theory/test_statements.py`
plants fourteen mistakes in the operator's definition; each of them makes checks fail. So does NaN, which
marks a comparison whose precondition does not hold.

"""


def select(words: list[str]) -> list[Check]:
    """Return the checks whose name or statement contains one of the words; all if there are no words."""
    wanted = [word.lower() for word in words or [""]]
    checks = [
        check for check in CHECKS if any(word in f"{check.name} {check.statement}".lower() for word in wanted)
    ]
    if not checks:
        raise UserError(
            f"no check contains {' or '.join(map(repr, words))} in its name or statement; "
            f"allowed: a part of {', '.join(check.name for check in CHECKS)}"
        )
    return checks


def run(checks: list[Check]) -> list[Outcome]:
    """Run checks for each of their bases, with a counter on standard error if that is a terminal."""
    outcomes = []
    for number, check in enumerate(checks, 1):
        outcomes += [check.run(base) for base in check.bases]
        if sys.stderr.isatty():
            print(f"{number}/{len(checks)}", end="\r", file=sys.stderr, flush=True)
    return outcomes


def table(outcomes: list[Outcome]) -> Table:
    """Return a table with a row for each statement and a column for each layer."""
    layers = list(BASES.values())
    columns = ["statement", "in the paper", "what is measured", *layers, "tolerance", "verdict"]
    rows = []
    for check in dict.fromkeys(outcome.check for outcome in outcomes):
        by_layer = {outcome.layer: outcome for outcome in outcomes if outcome.check is check}
        measured = [f"{by_layer[layer].measured:.2g}" if layer in by_layer else "" for layer in layers]
        limit = f"{'≥' if check.at_least else '≤'} {check.tolerance:g}"
        verdict = "passed" if all(outcome.passed for outcome in by_layer.values()) else "FAILED"
        rows.append([check.statement, check.where, check.quantity, *measured, limit, verdict])
    return Table(columns, rows, left=frozenset(columns[1:3] + columns[-1:]))
