"""``hypermlp eval``: checkpoints under lm-evaluation-harness, side by side."""

import argparse
import os
import sys
from functools import partial
from typing import Any

import torch

from hypermlp.errors import UserError
from hypermlp.evals import suites
from hypermlp.models.loading import model_folder
from hypermlp.reporting.records import check_writable, new_record, write_record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="runs, folders of save_pretrained, or names on the hub",
    )
    parser.add_argument(
        "--suite",
        default="local",
        choices=suites.SUITES,
        help="local needs no network; paper is the paper's table",
    )
    parser.add_argument(
        "--fetch", action="store_true", help="only download the suite's data, for machines without a network"
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="sequences at once; does not change scores (default: 16)"
    )
    parser.add_argument("--max-length", type=int, help="of the context (default: the model's)")
    parser.add_argument("--limit", type=int, help="only so many questions of each task, for a trial")
    parser.add_argument("--device", default=device, help=f"default here: {device}")
    parser.add_argument("--json", metavar="FILE", help="write a record")


def main(args: argparse.Namespace) -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"evaluation needs lm-evaluation-harness: pip install 'hypermlp[eval]' ({error})"
        ) from error
    from hypermlp.evals import run
    from hypermlp.evals.checkpoint import check_device

    say = partial(
        print, file=sys.stdout, flush=True
    )  # where it goes now: the harness's own words are turned away
    for name in ("batch", "max_length", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.fetch:
        with run.quiet():
            suites.load_tasks(suites.columns(args.suite, context=0, vocab_size=0), tell=say)
        print(f"the data of suite {args.suite} is here")
        return
    if not all(args.checkpoints) or not args.checkpoints:
        raise UserError("no checkpoint; name one or several, such as a run of `hypermlp train`")
    check_device(args.device)
    for folder in filter(os.path.isdir, args.checkpoints):
        model_folder(folder)
    if args.json == "-":
        raise UserError("--json is -; name a file for the record")
    if args.json:
        check_writable(args.json)
    how = {
        "batch_size": args.batch,
        "max_length": args.max_length,
        "limit": args.limit,
        "device": args.device,
    }
    rows: list[dict[str, Any]] = []
    try:
        for checkpoint in args.checkpoints:
            rows.append(run.evaluate(checkpoint, args.suite, **how, tell=say))
            if args.json:  # after each one, so that none is lost
                write_record(args.json, new_record("eval", {"suite": args.suite, **how}, rows))
    finally:  # what went before a failure is still worth seeing
        if rows:
            print(run.table(rows))
            if args.json:
                print(f"record: {args.json}")
