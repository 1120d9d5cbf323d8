"""``hypermlp eval``: checkpoints under lm-evaluation-harness, side by side."""

import sys
from functools import partial
from typing import Any

from hypermlp.commands.shared import (
    DEVICE,
    Args,
    Argument,
    command,
    require_at_least,
    require_writable,
    save_record,
)
from hypermlp.errors import UserError
from hypermlp.evals import run, suites
from hypermlp.evals.table import score_table
from hypermlp.models.loading import is_local, model_folder


@command(
    Argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="runs, folders of save_pretrained, tiny, or names on the hub; none only with --fetch",
    ),
    Argument(
        "--suite",
        default="local",
        choices=suites.SUITES,
        help="local (default) needs no network; paper is the paper's table",
    ),
    Argument(
        "--fetch", action="store_true", help="only download the suite's data, for a machine without a network"
    ),
    Argument("--batch", type=int, default=16, help="sequences at once; does not change scores (default: 16)"),
    Argument("--max-length", type=int, help="context in tokens (default: the model's)"),
    Argument("--limit", type=int, help="evaluate only this many questions of each task, for a trial"),
    Argument("--device", default=DEVICE, help=f"default here: {DEVICE}"),
    Argument("--json", metavar="FILE", help="write the scores to a record"),
)
def main(args: Args) -> None:
    try:
        from hypermlp.evals.checkpoint import check_device
    except ImportError as error:
        raise UserError(
            f"evaluation needs lm-evaluation-harness: pip install 'hypermlp[eval]' ({error})"
        ) from error
    # Bound to the present standard output, because standard output is redirected while the harness runs.
    tell = partial(print, file=sys.stdout, flush=True)
    require_at_least(args, batch=1, max_length=1, limit=1)
    if args.fetch:
        with run.quiet():
            suites.load_tasks(suites.columns(args.suite, context=0, vocab_size=0), tell=tell)
        print(f"the data of suite {args.suite} is downloaded")
        return
    if not args.checkpoints or not all(args.checkpoints):
        raise UserError("no checkpoint was given; name one or more, such as a run of `hypermlp train`")
    check_device(args.device)
    for folder in filter(is_local, args.checkpoints):
        model_folder(folder)  # raises if it has no model
    require_writable(args.json)
    settings = {
        "batch_size": args.batch,
        "max_length": args.max_length,
        "limit": args.limit,
        "device": args.device,
    }
    rows: list[dict[str, Any]] = []
    try:
        for checkpoint in args.checkpoints:
            rows.append(run.evaluate(checkpoint, args.suite, **settings, tell=tell))
            # after each checkpoint, so that a failure loses none
            save_record(args.json, "eval", {"suite": args.suite, **settings}, rows)
    finally:  # also after a failure, with the checkpoints before it
        if rows:
            print(score_table(rows).markdown())
