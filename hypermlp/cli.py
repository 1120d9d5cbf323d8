"""The program ``hypermlp``: each command is a function in a module that is imported when the command is called."""

import argparse
import importlib
import os
import sys
from typing import Any, NamedTuple

from hypermlp import __version__
from hypermlp.errors import UserError


class Command(NamedTuple):
    place: str  # a module, or a name in one, that has add_arguments(parser) and main(args)
    summary: str
    example: str


COMMANDS = {
    "demo": Command("hypermlp.demo.run", "what this is about, in a few minutes, live", "hypermlp demo"),
    "info": Command(
        "hypermlp.commands.info", "versions, device, backends and why one is missing", "hypermlp info"
    ),
    "build": Command(
        "hypermlp.commands.build", "build the CPU kernels ahead of their first use", "hypermlp build --force"
    ),
    "train": Command(
        "hypermlp.train.run",
        "train a language model by a recipe, or go on",
        "hypermlp train demo --set training.steps=50",
    ),
    "sample": Command(
        "hypermlp.train.sample",
        "text from a trained model",
        "hypermlp sample runs/demo 'import os' --tokens 100",
    ),
    "serve": Command(
        "hypermlp.commands.serve",
        "an OpenAI-compatible server for a trained model",
        "hypermlp serve runs/demo --port 8000",
    ),
    "eval": Command(
        "hypermlp.commands.eval",
        "scores of checkpoints, side by side",
        "hypermlp eval runs/a runs/b --suite local",
    ),
    "report": Command(
        "hypermlp.commands.report",
        "any runs and records on one page",
        "hypermlp report runs docs/results --out report.html",
    ),
    "flops": Command(
        "hypermlp.commands.flops", "parameters and FLOPs of a model, part by part", "hypermlp flops lm-340m"
    ),
    "plan": Command(
        "hypermlp.costs.plan",
        "what a recipe will need: memory, FLOPs, days",
        "hypermlp plan lm-1.3b --gpu h100 --count 8",
    ),
    "mad run": Command(
        "hypermlp.commands.mad:RunCommand",
        "the MAD benchmark for a mixer",
        "hypermlp mad run --mixer G-cg-q-12o",
    ),
    "mad compare": Command(
        "hypermlp.commands.mad:CompareCommand",
        "the MAD benchmark for several",
        "hypermlp mad compare S-p G-cg-q-12o",
    ),
    "mad show": Command(
        "hypermlp.commands.mad:ShowCommand", "a task and an example of it", "hypermlp mad show compression"
    ),
    "study run": Command(
        "hypermlp.commands.study:RunCommand",
        "the paper's 33 variants, all or some",
        "hypermlp study run --size smoke",
    ),
    "study tune": Command(
        "hypermlp.commands.study:TuneCommand", "a learning rate for the study", "hypermlp study tune --jobs 2"
    ),
    "study report": Command(
        "hypermlp.commands.study:ReportCommand",
        "the study as a page",
        "hypermlp study report runs/study-mini",
    ),
    "verify": Command(
        "hypermlp.commands.verify",
        "the paper's statements, measured on the real layer",
        "hypermlp verify --only lag",
    ),
    "inspect": Command(
        "hypermlp.commands.inspect",
        "a model's memory on a page",
        "hypermlp inspect runs/demo --prompt 'def f(x):'",
    ),
    "bench op": Command(
        "hypermlp.commands.bench:OpCommand",
        "time and memory of operator and layer against PyTorch's fused softmax attention",
        "hypermlp bench op --batch 1 --length 4096 --json bench.json",
    ),
    "bench table": Command(
        "hypermlp.commands.bench:TableCommand",
        "the paper's efficiency table, for every mixer",
        "hypermlp bench table --count-only",
    ),
    "bench lm": Command(
        "hypermlp.commands.bench:LmCommand",
        "training throughput of a recipe against softmax attention",
        "hypermlp bench lm",
    ),
}


def overview(group: str = "") -> str:
    """All commands, or those that begin with a word."""
    named = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, named))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in named.items()]
    return (
        f"usage: hypermlp {group}COMMAND ...\n\n"
        + "\n".join(lines)
        + "\n\nhypermlp COMMAND --help explains one, with an example."
    )


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        print(f"hypermlp {__version__}")
        return 0
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        asked_for_help = not words or words[-1] in ("-h", "--help")
        inner = [name.split()[1] for name in COMMANDS if words and name.startswith(words[0] + " ")]
        if not asked_for_help:
            said = (
                f"{words[0]!r} is followed by one of: {', '.join(inner)}"
                if inner
                else f"unknown command {' '.join(words[:1])!r}"
            )
            print(f"hypermlp: {said}", file=sys.stderr)
        print(overview(words[0] + " " if inner else ""), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    command = COMMANDS[name]
    module, _, within = command.place.partition(":")
    place: Any = importlib.import_module(module)
    place = getattr(place, within) if within else place
    parser = argparse.ArgumentParser(
        prog=f"hypermlp {name}", description=command.summary, epilog=f"example: {command.example}"
    )
    place.add_arguments(parser)
    args = parser.parse_args(words[len(name.split()) :])
    try:
        place.main(args)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:
        print(f"hypermlp {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hypermlp {name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
