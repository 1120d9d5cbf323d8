"""``hypermlp info``: what is installed, what will run, and why something will not."""

import argparse
import importlib.metadata
import json
from typing import Any

import torch

from hypermlp import __version__
from hypermlp.ops import build
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS, choose_backend
from hypermlp.reporting.records import machine

OPTIONAL = ("triton", "transformers", "accelerate", "datasets", "lm_eval", "flash-linear-attention", "ray")


def gather() -> dict[str, Any]:
    reasons = {name: backend.unavailable() for name, backend in BACKENDS.items()}
    return {
        "hypermlp": __version__,
        "machine": machine(),
        "backends": {
            name: "available" if reason is None else f"not available: {reason}"
            for name, reason in reasons.items()
        },
        "auto": _auto(),
        "kernels": _kernels(),
        "packages": {name: _version(name) for name in OPTIONAL},
    }


def _auto() -> str:
    """What "auto" takes for HyperGLU on this machine; HYPERMLP_BACKEND counts."""
    try:
        return choose_backend("auto", Request("attention", "cpu", torch.float32, "glu", mixed=True)).name
    except ValueError as error:
        return f"nothing: {error}"


def _kernels() -> str:
    try:
        return str(build.library_path())
    except build.BuildError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> None:
    facts = gather()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    print(f"hypermlp {facts['hypermlp']}")
    for title in ("machine", "backends", "packages"):
        print(f"\n{title}")
        for name, value in facts[title].items():
            print(f"  {name:<24}{value}")
    print(f'\nbackend "auto" takes: {facts["auto"]}\nkernels: {facts["kernels"]}')
