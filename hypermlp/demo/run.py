"""The demonstration, its live display, and what it must come to."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hypermlp.demo import language
from hypermlp.demo.recall import EVALUATE_EVERY, Racer, race, racers
from hypermlp.errors import UserError
from hypermlp.ops import available_backends
from hypermlp.train.recipe import load_recipe

SEED = 1


class Check(NamedTuple):
    what: str
    expected: str
    got: str
    holds: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the language model goes (default: a new temporary folder)"
    )


def main(args: argparse.Namespace) -> None:
    console, began = Console(), time.monotonic()
    console.print("[bold]hypermlp demo[/bold]: about three minutes on two cores, nothing is downloaded")
    console.print(f"operator backends: {', '.join(available_backends())}\n")
    checks = show_recall(console) + show_language(
        console, Path(args.out or tempfile.mkdtemp(prefix="hypermlp-demo-"))
    )
    console.print(results(checks))
    failed = sum(not check.holds for check in checks)
    console.print(f"{time.monotonic() - began:.0f} s in all")
    if failed:
        raise UserError(f"{failed} of {len(checks)} came out differently from what was expected")


def show_recall(console: Console) -> list[Check]:
    console.rule("1. in-context recall")
    console.print(
        "A sequence gives values to keys; what was the value of this key? Accuracy on new sequences, 12 % is chance.\n"
    )
    field = racers(SEED)
    with Live(standings(field), console=console, refresh_per_second=4) as live:
        for _ in race(field, SEED):
            live.update(standings(field))
            if not console.is_terminal and field[-1].step % (5 * EVALUATE_EVERY) == 0:
                live.console.print(
                    "  ".join(f"{racer.name} {racer.accuracy:.0%}" for racer in field),
                    f"  step {field[-1].step}",
                )
    console.print()
    glu, rope, plain = field
    reached = f"{rope.step} steps" if rope.solved else f"{rope.accuracy:.0%} after {rope.step} steps"
    return [
        Check(
            "recall of 99 %: HyperGLU",
            "within 150 steps",
            f"{glu.step} steps",
            glu.solved and glu.step <= 150,
        ),
        Check("softmax with RoPE", "1.5 times as many, or more", reached, rope.step >= 1.5 * glu.step),
        Check(
            "softmax without positions", "below 60 % by then", f"{plain.accuracy:.0%}", plain.accuracy < 0.6
        ),
    ]


def standings(field: list[Racer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("model", "label", "steps", "accuracy", "", ""):
        table.add_column(column, justify="right" if column in ("steps", "accuracy") else "left")
    for racer in field:
        bar = ProgressBar(total=1.0, completed=racer.accuracy, width=40)
        table.add_row(
            racer.name,
            racer.label,
            str(racer.step),
            f"{racer.accuracy:.0%}",
            bar,
            "solved" if racer.solved else "",
        )
    return table


def show_language(console: Console, folder: Path) -> list[Check]:
    recipe = load_recipe("demo")
    console.rule("2. a language model on Python's own source")
    console.print(Panel(Text(language.sample_untrained(recipe)), title="before", width=100))
    model, tokenizer, loss = language.learn(recipe, folder)
    written = language.sample(model, tokenizer)
    console.print(Panel(Text(written), title="after", width=100))
    console.print(f"more of it: hypermlp sample {folder} 'import '\n")
    console.rule("3. decoding with a cache")
    error = language.cache_error(model, tokenizer, written)
    console.print(
        f"the {len(written)} characters above, at once and token by token: log-probabilities differ by at most {error:.1e}\n"
    )
    return [
        Check("held-out loss, nats per byte", "below 2.0 (untrained 5.55)", f"{loss:.2f}", loss < 2.0),
        Check("cached against full forward", "within 1e-3", f"{error:.1e}", error < 1e-3),
    ]


def results(checks: list[Check]) -> Table:
    table = Table("", "expected", "got", "", box=box.SIMPLE_HEAD)
    for check in checks:
        table.add_row(
            check.what, check.expected, check.got, "[green]yes[/green]" if check.holds else "[red]no[/red]"
        )
    return table
