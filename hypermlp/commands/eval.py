"""``hypermlp eval``: checkpoints under lm-evaluation-harness, by position, or by length, side by side."""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from hypermlp.commands.shared import (
    ON_DEVICE,
    Args,
    Argument,
    check_device,
    command,
    require_writable,
    save_record,
)
from hypermlp.errors import UserError
from hypermlp.evals import positions, recall, run, suites
from hypermlp.evals.table import score_table
from hypermlp.evals.variants import KINDS
from hypermlp.models.loading import is_local, model_folder


@command(
    Argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="runs, folders of save_pretrained, tiny, or names on the hub; none only with --fetch. With "
        "--by-position also RUN@VARIANT, such as runs/x@window=64; with the suite recall-length mixers, such "
        f"as S-p@yarn. Variants: {', '.join(KINDS)}",
    ),
    Argument(
        "--suite",
        default="local",
        choices=[*suites.SUITES, recall.SUITE],
        help="local (default) needs no network; paper is the paper's table; recall-length trains small "
        "models on two recall tasks and tests them at 1 to 8 times their length",
    ),
    Argument(
        "--by-position",
        action="store_true",
        help="loss by position on held-out text beyond the trained context, instead of a suite",
    ),
    Argument("--length", least=1, help="--by-position: positions (default: 8 times the trained context)"),
    Argument("--texts", least=1, default=64, help="--by-position: number of texts"),
    Argument(
        "--fetch", action="store_true", help="only download the suite's data, for a machine without a network"
    ),
    Argument("--batch", least=1, default=16, help="sequences at once; does not change scores"),
    Argument("--max-length", least=1, help="context in tokens (default: the model's)"),
    Argument("--limit", least=1, help="evaluate only this many questions of each task, for a trial"),
    ON_DEVICE,
    Argument("--json", metavar="FILE", help="write the scores to a record"),
)
def main(args: Args) -> None:
    require_writable(args.json)
    if args.by_position:
        _by_position(args)
    elif args.suite == recall.SUITE:
        _recall_by_length(args)
    else:
        _harness(args)


Row = dict[str, Any]


def _record_all(
    args: Args,
    kind: str,
    rows: Iterable[tuple[Row, dict[str, Any]]],
    shown: Callable[[list[Row], dict[str, Any]], str],
) -> None:
    """Write the record after every row, with the settings that come with it; print the rows in the end.

    A failure loses no row: those before it are in the record, and are printed.
    """
    done: list[Row] = []
    settings: dict[str, Any] = {}
    try:
        for row, settings in rows:
            done.append(row)
            save_record(args.json, kind, settings, done)
    finally:
        if done:
            print(shown(done, settings))


def _by_position(args: Args) -> None:
    _require_checkpoints(args)
    transformers.logging.disable_progress_bar()
    report = partial(print, flush=True)

    def rows() -> Iterator[tuple[Row, dict[str, Any]]]:
        for row, context in positions.evaluate_positions(
            args.checkpoints, length=args.length, texts=args.texts, report=report
        ):
            report(positions.headline(row, context))
            yield row, {"context": context, "length": row["edges"][-1], "texts": row["texts"]}

    def shown(rows: list[Row], settings: dict[str, Any]) -> str:
        return positions.position_table(rows, settings["context"]).markdown()

    _record_all(args, positions.KIND, rows(), shown)


def _recall_by_length(args: Args) -> None:
    settings = {"limit": args.limit, "seed": recall.SEED}
    rows = recall.evaluate_recall(args.checkpoints, limit=args.limit, report=partial(print, flush=True))
    recorded = ((row, settings) for row in rows)
    _record_all(args, recall.SUITE, recorded, lambda rows, _: recall.recall_table(rows).markdown())


def _require_checkpoints(args: Args) -> None:
    if not args.checkpoints or not all(args.checkpoints):
        raise UserError("no checkpoint was given; name one or more, such as a run of `hypermlp train`")


def _harness(args: Args) -> None:
    try:
        importlib.import_module("hypermlp.evals.checkpoint")
    except ImportError as error:
        raise UserError(
            f"evaluation needs lm-evaluation-harness: pip install 'hypermlp[eval]' ({error})"
        ) from error
    # Bound to the present standard output, because standard output is redirected while the harness runs.
    report = partial(print, file=sys.stdout, flush=True)
    if args.fetch:
        with run.quiet():
            suites.load_tasks(suites.columns(args.suite, context=0, vocab_size=0), report=report)
        print(f"the data of suite {args.suite} is downloaded")
        return
    _require_checkpoints(args)
    for name in args.checkpoints:
        if "@" in name and not Path(name).exists():
            raise UserError(
                f"{name!r} names a variant; variants need --by-position or --suite {recall.SUITE}"
            )
    check_device(args.device)
    for folder in filter(is_local, args.checkpoints):
        model_folder(folder)  # raises if it has no model
    settings = {
        "batch_size": args.batch,
        "max_length": args.max_length,
        "limit": args.limit,
        "device": args.device,
    }
    scored = (run.evaluate(name, args.suite, **settings, report=report) for name in args.checkpoints)
    recorded = ((row, {"suite": args.suite, **settings}) for row in scored)
    notes = suites.NOTES.get(args.suite, "")
    _record_all(args, "eval", recorded, lambda rows, _: f"{score_table(rows).markdown()}\n{notes}")
