"""``hypermlp bench lm``: how many tokens per second a recipe's model trains on, against the same model with softmax attention.

With ``--mixer``, a table of everything for the named mixers: bench/mixers.py.
"""

import argparse
import itertools
import json
from typing import Any

import torch

from hypermlp.bench import mixers
from hypermlp.bench.measure import WARMUPS, Work, interleaved_medians
from hypermlp.bench.step import training_step
from hypermlp.errors import UserError
from hypermlp.layers.registry import chosen_mixers
from hypermlp.reporting.records import check_writable, new_record, write_record
from hypermlp.train.data import prepare
from hypermlp.train.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", default="cpu-mini", help="whose model, data and batch (default: cpu-mini)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument(
        "--mixer", nargs="+", metavar="NAME", help="all costs of these mixers, or of all, instead"
    )
    parser.add_argument(
        "--rivals",
        nargs="+",
        default=["S-p", "S"],
        help="softmax labels; the fastest one counts (default: S-p S)",
    )
    parser.add_argument(
        "--rival-heads", type=int, nargs="+", default=[2, 4], help="their head counts (default: 2 4)"
    )
    parser.add_argument("--rounds", type=int, default=30, help="most timed steps of each model (default: 30)")
    parser.add_argument("--seconds", type=float, default=90, help="stop after so many seconds (default: 90)")
    parser.add_argument("--json", metavar="FILE", help="write a record")


def main(args: argparse.Namespace) -> None:
    if args.json:
        check_writable(args.json)
    if args.rounds < 3 or not args.seconds > 0:
        raise UserError(f"--rounds is {args.rounds}, --seconds {args.seconds}; at least 3, and positive")
    recipe = load_recipe(args.recipe, args.set)
    if args.mixer:
        compare_mixers(args)
        return
    ours = str(recipe.model.get("mixer", "G-cg-q-12o"))
    prepared = prepare(recipe.data)
    works: dict[str, Work] = {ours: training_step(recipe, prepared)}
    for label, heads in itertools.product(args.rivals, args.rival_heads):
        overrides = [f"model.mixer={json.dumps(label)}", f"model.num_heads={heads}"]
        works[f"{label}, {heads} heads"] = training_step(
            load_recipe(args.recipe, args.set + overrides), prepared
        )
    tokens = recipe.training.micro_batch * recipe.data.context
    print(
        f"{recipe.name}: steps of {tokens:,} tokens, {torch.get_num_threads()} threads, {args.seconds:.0f} s at most",
        flush=True,
    )
    times = interleaved_medians(works, rounds=args.rounds, seconds=args.seconds)
    rows = [
        {"mixer": name, "ms": 1000 * time, "tokens_per_second": tokens / time} for name, time in times.items()
    ]
    print(table(rows))
    if args.json:
        settings: dict[str, Any] = {
            "recipe": recipe.to_dict(),
            "rounds": args.rounds,
            "seconds": args.seconds,
        }
        write_record(args.json, new_record("bench-lm", settings, rows))
        print(f"record: {args.json}")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; the first row is ours, its throughput is compared with each rival's."""
    lines = ["| mixer | ms per step | tokens/s | ours trains |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        compared = (
            ""
            if row is rows[0]
            else f"{rows[0]['tokens_per_second'] / row['tokens_per_second']:.2f} times as fast"
        )
        lines.append(f"| {row['mixer']} | {row['ms']:.0f} | {row['tokens_per_second']:,.0f} | {compared} |")
    return "\n".join(lines)


def compare_mixers(args: argparse.Namespace) -> None:
    names = chosen_mixers(args.mixer)
    recipe = load_recipe(args.recipe, args.set)
    for name in names:
        changed = load_recipe(args.recipe, [*args.set, f"model.mixer={json.dumps(name)}"])
        changed.model_config(256)  # says what is wrong before anything runs
    if recipe.data.context <= args.rounds + WARMUPS:
        raise UserError(
            f"--rounds is {args.rounds}, data.context {recipe.data.context}; each round decodes a token: take fewer rounds"
        )
    threads = torch.get_num_threads()
    print(
        f"{recipe.name} with {len(names)} mixers, {threads} threads, {args.seconds:.0f} s of timing at most",
        flush=True,
    )
    rows = mixers.measure(
        args.recipe, args.set, names, prepare(recipe.data), rounds=args.rounds, seconds=args.seconds
    )
    print(mixers.table(rows))
    if args.json:
        settings = {"recipe": recipe.to_dict(), "rounds": args.rounds, "seconds": args.seconds}
        write_record(args.json, new_record("bench-mixers", settings, rows))
        print(f"record: {args.json}")
