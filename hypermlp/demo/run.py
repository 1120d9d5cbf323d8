"""The demonstration: what it trains, its live display, and the results that it expects."""

from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from hypermlp.demo import language
from hypermlp.demo.recall import EVALUATE_EVERY, race, racers
from hypermlp.reporting.sources import Curve
from hypermlp.reporting.table import Table
from hypermlp.train.recipe import load_recipe

SEED = 1
RIVAL = ("model.mixer=S-p", "model.match_parameters=G-cg-q-12o")


class Expectation(NamedTuple):
    """A result and what it should be."""

    what: str
    expected: str
    got: str
    holds: bool


class Shown(NamedTuple):
    """What a part of the demonstration has shown: its results, and its learning curves by name."""

    expectations: list[Expectation]
    curves: dict[str, Curve]


def show_recall(console: Console) -> Shown:
    """Race three mixers on in-context recall, with a live table of their accuracies."""
    console.rule("1. in-context recall")
    console.print("A sequence assigns values to keys. Then a key is given, and the model predicts its value.")
    console.print("The accuracy is measured on new sequences; chance is 12 %.\n")
    field = racers(SEED)
    columns = [
        TextColumn(text)
        for text in ("{task.description}", "{task.percentage:>3.0f} %", "{task.fields[steps]}")
    ]
    with Progress(*columns[:1], BarColumn(40), *columns[1:], console=console) as display:
        bars = [display.add_task(f"{racer.name:<18} {racer.label}", total=1.0, steps="") for racer in field]
        for _ in race(field, SEED):
            for bar, racer in zip(bars, field, strict=True):
                display.update(bar, completed=racer.accuracy, steps=f"{racer.step} steps")
            if not console.is_terminal and field[-1].step % (5 * EVALUATE_EVERY) == 0:
                accuracies = (f"{racer.name} {racer.accuracy:.0%}" for racer in field)
                console.print(*accuracies, f"step {field[-1].step}", sep="  ")
    console.print()
    glu, rope, plain = field
    reached = f"{rope.step} steps" if rope.solved else f"{rope.accuracy:.0%} after {rope.step} steps"
    in_time = glu.solved and glu.step <= 150
    expectations = [
        Expectation("HyperGLU recalls 99 %", "within 150 steps", f"{glu.step} steps", in_time),
        Expectation("softmax with RoPE", "1.5 times as many, or more", reached, rope.step >= 1.5 * glu.step),
        Expectation(
            "softmax without positions", "below 60 % by then", f"{plain.accuracy:.0%}", plain.accuracy < 0.6
        ),
    ]
    return Shown(expectations, {racer.name: racer.curve for racer in field})


def show_language(console: Console, folder: Path) -> Shown:
    """Train a language model and its softmax rival in ``folder``, show samples, and check the cache."""
    recipe = load_recipe("demo")
    console.rule("2. a language model on the source of Python's standard library")
    console.print(Panel(Text(language.sample_untrained(recipe)), title="before", width=100))
    model, tokenizer, curve = language.learn(recipe, folder / "hyperglu")
    written = language.sample(model, tokenizer)
    console.print(Panel(Text(written), title="after", width=100))
    console.print(f"to sample more: hypermlp sample {folder / 'hyperglu'} 'import '\n")
    console.print("The same model with softmax attention (RoPE), and a wider MLP for as many parameters:")
    rival = load_recipe("demo", ["name=demo-softmax", *RIVAL])
    _, _, rival_curve = language.learn(rival, folder / "softmax")
    console.print()
    console.rule("3. decoding with a cache")
    error = language.cache_error(model, tokenizer, written)
    console.print(
        f"The {len(written)} characters above, in one forward pass and token by token with the cache:"
    )
    console.print(f"log-probabilities differ by at most {error:.1e}.\n")
    loss, rival_loss = curve[-1][1], rival_curve[-1][1]
    console.print(f"held-out loss, nats per byte: HyperGLU {loss:.3f}, softmax with RoPE {rival_loss:.3f}\n")
    expectations = [
        Expectation("held-out loss, nats per byte", "below 1.8 (untrained 5.55)", f"{loss:.2f}", loss < 1.8),
        Expectation("cached against full forward", "within 1e-3", f"{error:.1e}", error < 1e-3),
    ]
    return Shown(expectations, {"HyperGLU": curve, "softmax with RoPE": rival_curve})


def results(expectations: list[Expectation]) -> Table:
    """Return the table of all expectations and whether they hold."""
    rows = [[*expectation[:3], "yes" if expectation.holds else "no"] for expectation in expectations]
    return Table(["", "expected", "got", "as expected"], rows, frozenset({"expected", "got"}))
