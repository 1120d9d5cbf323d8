"""The demonstration: what it trains, its live display, and the results that it expects."""

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
from hypermlp.train.recipe import load_recipe

SEED = 1


class Expectation(NamedTuple):
    """A result and what it should be."""

    what: str
    expected: str
    got: str
    holds: bool


def show_recall(console: Console) -> list[Expectation]:
    """Race three mixers on in-context recall, with a live table of their accuracies."""
    console.rule("1. in-context recall")
    console.print("A sequence assigns values to keys. Then a key is given, and the model predicts its value.")
    console.print("The accuracy is measured on new sequences; chance is 12 %.\n")
    field = racers(SEED)
    with Live(standings(field), console=console, refresh_per_second=4) as live:
        for _ in race(field, SEED):
            live.update(standings(field))
            if not console.is_terminal and field[-1].step % (5 * EVALUATE_EVERY) == 0:
                accuracies = (f"{racer.name} {racer.accuracy:.0%}" for racer in field)
                live.console.print(*accuracies, f"step {field[-1].step}", sep="  ")
    console.print()
    glu, rope, plain = field
    reached = f"{rope.step} steps" if rope.solved else f"{rope.accuracy:.0%} after {rope.step} steps"
    in_time = glu.solved and glu.step <= 150
    return [
        Expectation("HyperGLU recalls 99 %", "within 150 steps", f"{glu.step} steps", in_time),
        Expectation("softmax with RoPE", "1.5 times as many, or more", reached, rope.step >= 1.5 * glu.step),
        Expectation(
            "softmax without positions", "below 60 % by then", f"{plain.accuracy:.0%}", plain.accuracy < 0.6
        ),
    ]


def standings(field: list[Racer]) -> Table:
    """Return the table of a race's current state, with a bar for each accuracy."""
    table = Table("model", "label", "steps", "accuracy", "", "", box=box.SIMPLE_HEAD)
    for racer in field:
        bar = ProgressBar(total=1.0, completed=racer.accuracy, width=40)
        solved = "solved" if racer.solved else ""
        table.add_row(racer.name, racer.label, f"{racer.step:>5}", f"{racer.accuracy:>8.0%}", bar, solved)
    return table


def show_language(console: Console, folder: Path) -> list[Expectation]:
    """Train a language model in ``folder``, show samples, and compare cached decoding with a full forward."""
    recipe = load_recipe("demo")
    console.rule("2. a language model on the source of Python's standard library")
    console.print(Panel(Text(language.sample_untrained(recipe)), title="before", width=100))
    model, tokenizer, loss = language.learn(recipe, folder)
    written = language.sample(model, tokenizer)
    console.print(Panel(Text(written), title="after", width=100))
    console.print(f"to sample more: hypermlp sample {folder} 'import '\n")
    console.rule("3. decoding with a cache")
    error = language.cache_error(model, tokenizer, written)
    console.print(
        f"The {len(written)} characters above, in one forward pass and token by token with the cache:"
    )
    console.print(f"log-probabilities differ by at most {error:.1e}.\n")
    return [
        Expectation("held-out loss, nats per byte", "below 2.0 (untrained 5.55)", f"{loss:.2f}", loss < 2.0),
        Expectation("cached against full forward", "within 1e-3", f"{error:.1e}", error < 1e-3),
    ]


def results(expectations: list[Expectation]) -> Table:
    """Return the table of all expectations and whether they hold."""
    table = Table("", "expected", "got", "", box=box.SIMPLE_HEAD)
    for each in expectations:
        table.add_row(*each[:3], "[green]yes[/green]" if each.holds else "[red]no[/red]")
    return table
