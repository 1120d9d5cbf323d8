"""``hypermlp demo``: show in a few minutes, on any machine, what the package does."""

import tempfile
import time
from pathlib import Path

from rich.console import Console

from hypermlp.commands.shared import Args, Argument, command
from hypermlp.demo import run
from hypermlp.demo.picture import draw
from hypermlp.errors import UserError
from hypermlp.ops import available_backends


@command(
    Argument(
        "--out",
        metavar="FOLDER",
        help="folder of the two runs and the picture (default: a new temporary folder)",
    )
)
def main(args: Args) -> None:
    console, began = Console(), time.monotonic()
    console.print("[bold]hypermlp demo[/bold]: about four minutes on two idle cores; nothing is downloaded")
    console.print(f"operator backends: {', '.join(available_backends())}\n")
    folder = Path(args.out or tempfile.mkdtemp(prefix="hypermlp-demo-"))
    recall, language = run.show_recall(console), run.show_language(console, folder)
    expectations = recall.expectations + language.expectations
    print(run.results(expectations).terminal())
    picture = draw(folder / "demo.png", recall.curves, language.curves)
    console.print(f"the learning curves: {picture}")
    console.print(f"{time.monotonic() - began:.0f} s in all")
    console.print("next: hypermlp sample tiny 'def ' (after make, first `. .venv/bin/activate`)")
    failed = sum(not expectation.holds for expectation in expectations)
    if failed:
        raise UserError(f"{failed} of {len(expectations)} results are not as expected")
