"""The program ``hypermlp``: it imports a command's module when the command is called, and runs it."""

import argparse
import io
import os
import pkgutil
import sys
from typing import Any, NamedTuple, NoReturn

from hypermlp import __version__
from hypermlp.errors import UserError, describe
from hypermlp.validation import near_miss


class Command(NamedTuple):
    """An entry of the overview; ``implementation`` finds the code by the command's name."""

    summary: str
    example: str


COMMANDS = {
    "demo": Command("show in a few minutes what the package does", "hypermlp demo"),
    "info": Command("versions, device, backends, and why one is not available", "hypermlp info"),
    "gpu-check": Command(
        "check and time the Triton kernels on this GPU, and record it",
        "hypermlp gpu-check --json gpu.json",
    ),
    "build": Command("build the CPU kernels before their first use", "hypermlp build --force"),
    "train": Command(
        "train a language model from a recipe, or resume a run", "hypermlp train demo --set training.steps=50"
    ),
    "sample": Command(
        "generate text with a trained model", "hypermlp sample runs/demo 'import os' --tokens 100"
    ),
    "extend": Command(
        "give a trained model a longer or shorter context",
        "hypermlp extend runs/demo --context 4096 --out runs/demo-4k",
    ),
    "serve": Command(
        "serve a trained model with an OpenAI-compatible API", "hypermlp serve runs/demo --port 8000"
    ),
    "eval": Command("score checkpoints side by side", "hypermlp eval runs/a runs/b --suite local"),
    "report": Command(
        "collect runs and records on one page",
        "hypermlp report runs docs/results --out report.html",
    ),
    "flops": Command("parameters and FLOPs of a model, part by part", "hypermlp flops lm-340m"),
    "plan": Command(
        "memory, FLOPs and days that a recipe needs", "hypermlp plan lm-1.3b --gpu h100 --count 8"
    ),
    "mad run": Command("run the MAD benchmark for one mixer", "hypermlp mad run --mixer G-cg-q-12o"),
    "mad compare": Command("run the MAD benchmark for several mixers", "hypermlp mad compare S-p G-cg-q-12o"),
    "mad show": Command("show a MAD task and an example of it", "hypermlp mad show compression"),
    "study run": Command("train the paper's 33 variants, or some of them", "hypermlp study run --size smoke"),
    "study tune": Command(
        "train some of the variants at four learning rates", "hypermlp study tune --jobs 2"
    ),
    "study report": Command("write the study's page", "hypermlp study report runs/study-mini"),
    "study scale": Command(
        "train models of several sizes and fit loss against size", "hypermlp study scale --plan smoke"
    ),
    "study figure": Command("draw the learning curves", "hypermlp study figure runs/study-headline"),
    "verify": Command("measure the paper's statements on the real layer", "hypermlp verify --only lag"),
    "inspect": Command(
        "write a page that shows which tokens each token of a text uses",
        "hypermlp inspect runs/demo --prompt 'def f(x):'",
    ),
    "bench op": Command(
        "time and memory of operator and layer against PyTorch's fused softmax attention",
        "hypermlp bench op --batch 1 --length 4096 --json bench.json",
    ),
    "bench table": Command(
        "the paper's efficiency table for every mixer", "hypermlp bench table --count-only"
    ),
    "bench lm": Command("training throughput of a recipe against softmax attention", "hypermlp bench lm"),
    "bench window": Command(
        "memory and time of sliding windows: decoding and training stay linear",
        "hypermlp bench window --window 256",
    ),
}


EXTRAS = {  # package -> the extra that installs it
    **dict.fromkeys(
        ("accelerate", "datasets", "filelock", "huggingface_hub", "pyarrow", "rich", "tensorboard"), "train"
    ),
    **dict.fromkeys(("tokenizers", "tqdm", "transformers", "yaml"), "train"),
    **dict.fromkeys(("fastapi", "uvicorn"), "serve"),
    **dict.fromkeys(("jinja2", "matplotlib"), "report"),
    "lm_eval": "eval",
    "ray": "cluster",
}


def implementation(name: str) -> Any:
    """Import a command's implementation: its ``arguments``, and ``main(args)``, which runs it.

    By convention, ``flops`` is ``main`` in the module hypermlp.commands.flops, ``gpu-check`` ``main`` in
    hypermlp.commands.gpu_check, and ``mad run`` is ``run_command`` in hypermlp.commands.mad.
    """
    module, _, subcommand = name.replace("-", "_").partition(" ")
    function = f"{subcommand}_command" if subcommand else "main"
    return pkgutil.resolve_name(f"hypermlp.commands.{module}:{function}")


def explain(words: list[str]) -> int:
    """Print the commands for words that name none of them; return the exit code, 0 if the words ask for help.

    Only the subcommands are listed if the first word has some.
    """
    group = next((f"{words[0]} " for name in COMMANDS if words and name.startswith(f"{words[0]} ")), "")
    listed = {name: command.summary for name, command in COMMANDS.items() if name.startswith(group)}
    asked_for_help = not words or words[-1] in ("-h", "--help")
    stream = sys.stdout if asked_for_help else sys.stderr
    if not asked_for_help:
        subcommands = ", ".join(name.removeprefix(group) for name in listed)
        given = f", not {words[1]!r}{near_miss(words[1], subcommands.split(', '))}" if len(words) > 1 else ""
        needed = f"{words[0]!r} needs one of: {subcommands}{given}"
        if not group:
            needed = (
                f"unknown command {words[0]!r}{near_miss(words[0], {name.split()[0] for name in COMMANDS})}"
            )
        print(f"hypermlp: {needed}", file=stream)
    lines = [f"  {name:<{max(map(len, listed))}}  {summary}" for name, summary in listed.items()]
    print(f"usage: hypermlp {group}COMMAND ...\n", *lines, sep="\n", file=stream)
    print("\nhypermlp COMMAND --help explains one command, with an example.", file=stream)
    return 0 if asked_for_help else 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. An error that the user can fix prints its message alone."""
    words = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have bytes that no character stands for
        sys.stdout.reconfigure(errors="backslashreplace")
    if words[:1] == ["--version"]:
        print(f"hypermlp {__version__}")
        return 0
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return explain(words)
    command = COMMANDS[name]
    try:
        return _run(name, command, words[len(name.split()) :])
    except KeyboardInterrupt:  # also while the command is imported, which takes seconds
        print(f"hypermlp {name}: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = name if name in EXTRAS.values() else EXTRAS[package]  # eval, report and serve have their own
        print(
            f"hypermlp {name} needs the package {package}, which is not installed: "
            f"pip install 'hypermlp[{extra}]'",
            file=sys.stderr,
        )
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the commands, instead of argparse's usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the arguments\n")


def _run(name: str, command: Command, words: list[str]) -> int:
    """Import, parse and run one command; return its exit code."""
    implemented = implementation(name)
    parser = _Parser(
        prog=f"hypermlp {name}", description=command.summary, epilog=f"example: {command.example}"
    )
    for argument in implemented.arguments:
        parser.add_argument(*argument.names, **argument.settings)
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        options = [name for argument in implemented.arguments for name in argument.names if name[0] == "-"]
        note = near_miss(unknown[0].partition("=")[0], options)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{note}")
    try:
        implemented.main(args)
    except BrokenPipeError:  # stdout was closed, for example by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        print(f"hypermlp {name}: {describe(error)}", file=sys.stderr)
        return 2
    return 0
