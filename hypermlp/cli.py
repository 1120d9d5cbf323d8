"""The program ``hypermlp``: it imports a command's module when the command is called, and runs it."""

import argparse
import importlib
import os
import sys
from typing import Any, NamedTuple

from hypermlp import __version__
from hypermlp.errors import UserError


class Command(NamedTuple):
    """An entry of the overview; ``place`` is for commands outside the convention of ``implementation``."""

    summary: str
    example: str
    place: str = ""
    """``module`` or ``module:Class``."""


COMMANDS = {
    "demo": Command("show in a few minutes what the package does", "hypermlp demo"),
    "info": Command("versions, device, backends, and why one is not available", "hypermlp info"),
    "build": Command("build the CPU kernels before their first use", "hypermlp build --force"),
    "train": Command(
        "train a language model from a recipe, or resume a run", "hypermlp train demo --set training.steps=50"
    ),
    "sample": Command(
        "generate text with a trained model", "hypermlp sample runs/demo 'import os' --tokens 100"
    ),
    "serve": Command(
        "serve a trained model with an OpenAI-compatible API", "hypermlp serve runs/demo --port 8000"
    ),
    "eval": Command("score checkpoints side by side", "hypermlp eval runs/a runs/b --suite local"),
    "report": Command(
        "collect runs and records on one page",
        "hypermlp report runs docs/results --out report.html",
        "hypermlp.report.page",
    ),
    "flops": Command("parameters and FLOPs of a model, part by part", "hypermlp flops lm-340m"),
    "plan": Command(
        "memory, FLOPs and days that a recipe needs", "hypermlp plan lm-1.3b --gpu h100 --count 8"
    ),
    "mad run": Command("run the MAD benchmark for one mixer", "hypermlp mad run --mixer G-cg-q-12o"),
    "mad compare": Command("run the MAD benchmark for several mixers", "hypermlp mad compare S-p G-cg-q-12o"),
    "mad show": Command("show a MAD task and an example of it", "hypermlp mad show compression"),
    "study run": Command("train the paper's 33 variants, or some of them", "hypermlp study run --size smoke"),
    "study tune": Command("compare learning rates for the study", "hypermlp study tune --jobs 2"),
    "study report": Command("write the study's page", "hypermlp study report runs/study-mini"),
    "verify": Command("measure the paper's statements on the real layer", "hypermlp verify --only lag"),
    "inspect": Command("show a model's memory on a page", "hypermlp inspect runs/demo --prompt 'def f(x):'"),
    "bench op": Command(
        "time and memory of operator and layer against PyTorch's fused softmax attention",
        "hypermlp bench op --batch 1 --length 4096 --json bench.json",
        "hypermlp.bench.op",
    ),
    "bench table": Command(
        "the paper's efficiency table for every mixer",
        "hypermlp bench table --count-only",
        "hypermlp.bench.table",
    ),
    "bench lm": Command(
        "training throughput of a recipe against softmax attention", "hypermlp bench lm", "hypermlp.bench.lm"
    ),
}


def implementation(name: str) -> Any:
    """Import what implements a command: an object with ``add_arguments(parser)`` and ``main(args)``.

    By convention, ``flops`` is the module hypermlp.commands.flops, and ``mad run`` is the class RunCommand in
    the module hypermlp.commands.mad.
    """
    word, *subcommands = name.split()
    convention = ":".join([f"hypermlp.commands.{word}", *(f"{sub.title()}Command" for sub in subcommands)])
    module, _, inner = (COMMANDS[name].place or convention).partition(":")
    found = importlib.import_module(module)
    return getattr(found, inner) if inner else found


def overview(group: str = "") -> str:
    """Return the list of all commands, or of those whose name begins with ``group``."""
    listed = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, listed))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in listed.items()]
    return "\n".join(
        [f"usage: hypermlp {group}COMMAND ...\n", *lines, "\nhypermlp COMMAND --help explains one command."]
    )


def explain(words: list[str]) -> int:
    """Print the overview for words that name no command, and return the exit code: 0 if they ask for help."""
    group = words[0] + " " if words else ""
    subcommands = [name.removeprefix(group) for name in COMMANDS if group and name.startswith(group)]
    listed = overview(group if subcommands else "")
    if not words or words[-1] in ("-h", "--help"):
        print(listed)
        return 0
    problem = (
        f"{words[0]!r} needs one of: {', '.join(subcommands)}"
        if subcommands
        else f"unknown command {words[0]!r}"
    )
    print(f"hypermlp: {problem}\n{listed}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. An error that the user can fix prints its message alone."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        print(f"hypermlp {__version__}")
        return 0
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return explain(words)
    command, implemented = COMMANDS[name], implementation(name)
    parser = argparse.ArgumentParser(
        prog=f"hypermlp {name}", description=command.summary, epilog=f"example: {command.example}"
    )
    implemented.add_arguments(parser)
    args = parser.parse_args(words[len(name.split()) :])
    try:
        implemented.main(args)
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        print(f"hypermlp {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hypermlp {name}: interrupted", file=sys.stderr)
        return 130
    return 0
