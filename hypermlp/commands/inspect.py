"""``hypermlp inspect``: a checkpoint's memory while it reads a prompt, as a page and as figures."""

import argparse
import sys
from pathlib import Path

import torch
import transformers

from hypermlp.errors import UserError
from hypermlp.inspect import figures
from hypermlp.inspect.page import page
from hypermlp.inspect.panels import panels
from hypermlp.models.loading import load
from hypermlp.reporting.records import check_writable, write_text

LARGE = 8  # MB: phones take their time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a folder with a model, or a run of `hypermlp train`")
    parser.add_argument(
        "--prompt", required=True, help="the text to read; @FILE for a file's, - for standard input"
    )
    parser.add_argument("--tokens", type=int, help="read only so many tokens of it (default: all)")
    parser.add_argument(
        "--out", default="inspect.html", metavar="FILE", help="the page (default: inspect.html)"
    )
    parser.add_argument(
        "--figures", metavar="DIR", help="also each panel as PNG and SVG, for papers (needs matplotlib)"
    )


def main(args: argparse.Namespace) -> None:
    check_writable(args.out)
    if args.tokens is not None and args.tokens < 2:
        raise UserError(f"--tokens is {args.tokens}; it must be at least 2")
    prompt = _text(args.prompt)
    if args.figures:
        figures.pyplot()
        Path(args.figures).mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(args.checkpoint)
    with torch.no_grad():
        found = panels(model, tokenizer, prompt, args.tokens)
        count, name = (
            sum(parameter.numel() for parameter in model.parameters()),
            Path(args.checkpoint).resolve().name,
        )
        read = len(found.tokens) - found.registers
        kind = f"{', '.join(dict.fromkeys(model.config.mixers))}, {model.config.num_hidden_layers} layers, {count:,} parameters"
        behind = f" behind {found.registers} registers" if found.registers else ""
        about = f"Here is {name}: {kind}, reading {read} tokens{behind}."
        text = page(found, f"The memory of {name}", about)
    write_text(args.out, text)
    size = len(text.encode()) / 1e6
    print(f"wrote {args.out}: {len(found.layers)} layers, {read} tokens, {size:.1f} MB")
    if size > LARGE:
        print(f"that is much for a phone; --tokens {read // 2} makes it a quarter", file=sys.stderr)
    if args.figures:
        for path in figures.write_figures(found, Path(args.figures)):
            print(f"wrote {path}")


def _text(prompt: str) -> str:
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        text = Path(prompt[1:]).read_bytes().decode() if prompt.startswith("@") else prompt
        text.encode()  # an argument may hold bytes that are no text
    except UnicodeError as error:
        raise UserError(f"the prompt is not UTF-8: {error}") from error
    return text
