"""``hypermlp inspect``: show the memory of a checkpoint while it reads a prompt, as a page and as figures."""

import sys
from pathlib import Path

import transformers

from hypermlp.checkpoints import find_shipped
from hypermlp.commands.shared import CHECKPOINT, Args, Argument, command, read_prompt
from hypermlp.errors import UserError
from hypermlp.files import check_writable, write_text
from hypermlp.inspect import figures
from hypermlp.inspect.page import page
from hypermlp.inspect.panels import panels
from hypermlp.models.loading import load, model_folder
from hypermlp.reporting.figures import new_figure

PROGRAM = "def area(radius):\n    return 3.14 * radius * radius\n\nprint(area(2))\n"
LARGE = 8  # MB, above which a phone takes long to open the page


@command(
    CHECKPOINT,
    Argument(
        "--prompt",
        metavar="TEXT",
        help="the text to read; @FILE reads a file, - standard input (default: with a model of the package, "
        "a short program)",
    ),
    Argument("--tokens", least=2, help="read only this many tokens of it (default: all)"),
    Argument("--out", default="inspect.html", metavar="FILE", help="the page"),
    Argument("--figures", metavar="DIR", help="also write each panel as PNG and SVG (needs matplotlib)"),
)
def main(args: Args) -> None:
    check_writable(args.out)
    prompt = default_prompt(args.checkpoint) if args.prompt is None else read_prompt(args.prompt, files=True)
    if args.figures:
        new_figure(1, 1)  # raises without matplotlib, before the long work
        Path(args.figures).mkdir(parents=True, exist_ok=True)
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(args.checkpoint)
    shown = panels(model, tokenizer, prompt, args.tokens)
    text = page(shown, model, Path(args.checkpoint).resolve().name)
    write_text(args.out, text)
    size, count = len(text.encode()) / 1e6, len(shown.tokens) - shown.registers
    print(f"wrote {args.out}: {len(shown.layers)} layers, {count} tokens, {size:.1f} MB")
    if size > LARGE:
        print(f"the page is large for a phone; --tokens {count // 2} makes it a quarter", file=sys.stderr)
    if args.figures:
        for path in figures.write_figures(shown, Path(args.figures)):
            print(f"wrote {path}")


def default_prompt(checkpoint: str) -> str:
    """Return the text that a model of the package reads if there is no ``--prompt``."""
    if find_shipped(checkpoint) is None:
        model_folder(checkpoint)  # a checkpoint that does not exist is the first thing to report
        raise UserError("--prompt is missing; pass the text to read, such as --prompt 'def f(x):' or @FILE")
    return PROGRAM
