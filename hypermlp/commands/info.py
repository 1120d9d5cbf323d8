"""``hypermlp info``: versions, device, backends, and why a backend is not available."""

import importlib.metadata
import json
from typing import Any

import torch

from hypermlp import __version__
from hypermlp.commands.shared import Args, Argument, command
from hypermlp.errors import UserError
from hypermlp.ops import native
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS, choose_backend
from hypermlp.ops.triton import selfcheck
from hypermlp.reporting.records import machine

OPTIONAL = ("triton", "transformers", "accelerate", "datasets", "lm_eval", "flash-linear-attention", "ray")


def gather() -> dict[str, Any]:
    """Return everything that the command prints."""
    reasons = {name: backend.unavailable() for name, backend in BACKENDS.items()}
    return {
        "hypermlp": __version__,
        "machine": machine(),
        "backends": {
            name: "available" if reason is None else f"not available: {reason}"
            for name, reason in reasons.items()
        },
        "auto": _auto(),
        "triton self-check": _self_check(),
        "kernels": _kernels(),
        "packages": {name: _version(name) for name in OPTIONAL},
    }


def _auto() -> str:
    """Return the backend that "auto" chooses for HyperGLU on this CPU, or the reason why there is none."""
    try:
        return choose_backend("auto", Request("attention", "cpu", torch.float32, "glu", mixed=True)).name
    except UserError as error:
        return f"none: {error}"


def _self_check() -> str:
    """Return the verdict on the Triton kernels; on a machine with a GPU, run the check if there is none."""
    if BACKENDS["triton"].unavailable() is None and torch.cuda.is_available():
        BACKENDS["triton"].distrusted()
    return selfcheck.outcome()


def _kernels() -> str:
    """Return the instruction set and origin of the CPU kernels, or the reason why there are none."""
    try:
        return native.origin()
    except UserError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@command(
    Argument("--json", action="store_true", help="print JSON instead of text"),
)
def main(args: Args) -> None:
    facts = gather()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    print(f"hypermlp {facts['hypermlp']}")
    for title in ("machine", "backends", "packages"):
        print("", title, *(f"  {name:<24}{value}" for name, value in facts[title].items()), sep="\n")
    print(f'\nbackend "auto" chooses: {facts["auto"]}\nkernels: {facts["kernels"]}')
    print(f"self-check of the Triton kernels: {facts['triton self-check']}")
