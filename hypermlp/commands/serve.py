"""``hypermlp serve``: transformers' own OpenAI-compatible server, for our models."""

import argparse
import sys
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.sample import model_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a folder with a model, or a run of `hypermlp train`")
    parser.add_argument("--host", default="localhost", help="address to listen at (default: localhost)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default: 8000)")
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ... (default: auto)")


def main(args: argparse.Namespace) -> None:
    folder = model_folder(args.checkpoint)
    # The server looks for a model's class in transformers itself, which replaces its own module while it is imported.
    vars(sys.modules["transformers"])["HyperMLPForCausalLM"] = HyperMLPForCausalLM
    try:
        from transformers.cli.serve import Serve

        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # /v1/models fails without it
        print(
            f"http://{args.host}:{args.port}/v1/completions; the model is {folder.resolve()}, or leave it out; Ctrl-C stops",
            flush=True,
        )
        Serve(str(folder.resolve()), host=args.host, port=args.port, device=args.device)
    except ImportError as error:
        raise UserError("serving needs more packages: pip install 'hypermlp[serve]'") from error
