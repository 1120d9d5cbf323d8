"""``hypermlp verify``: measure every statement of the paper that can be computed on the real layer."""

import json

from hypermlp.commands.shared import PRINT_JSON, Args, Argument, command
from hypermlp.errors import UserError
from hypermlp.files import check_writable, write_text
from hypermlp.theory.verify import INTRODUCTION, run, select, table


@command(
    Argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="run the checks whose name or statement contains one of these words (default: all)",
    ),
    PRINT_JSON,
    Argument("--doc", metavar="FILE", help="also write the table, with an introduction, to a file"),
)
def main(args: Args) -> None:
    if args.doc:
        check_writable(args.doc)
    outcomes = run(select(args.only))
    text = table(outcomes).markdown()
    if args.doc:
        write_text(args.doc, f"{INTRODUCTION}{text}\n")
    failed = [f"{outcome.check.name} ({outcome.layer})" for outcome in outcomes if not outcome.passed]
    if args.json:
        print(json.dumps([outcome.to_dict() for outcome in outcomes], indent=2))
    else:
        seconds = sum(outcome.seconds for outcome in outcomes)
        print(f"{text}\n\n{len(outcomes) - len(failed)} of {len(outcomes)} passed, {seconds:.0f} s")
    if failed:
        raise UserError(f"{len(failed)} failed: {', '.join(failed)}")
