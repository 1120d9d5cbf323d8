"""``hypermlp demo``: show in a few minutes, on any machine, what the package does."""

import tempfile
import time
from pathlib import Path

from rich.console import Console

from hypermlp.commands.shared import Args, Argument, command
from hypermlp.demo import run
from hypermlp.errors import UserError
from hypermlp.ops import available_backends


@command(
    Argument(
        "--out", metavar="FOLDER", help="folder of the language model's run (default: a new temporary folder)"
    ),
)
def main(args: Args) -> None:
    console, began = Console(), time.monotonic()
    console.print("[bold]hypermlp demo[/bold]: about three minutes on two cores; nothing is downloaded")
    console.print(f"operator backends: {', '.join(available_backends())}\n")
    folder = Path(args.out or tempfile.mkdtemp(prefix="hypermlp-demo-"))
    expectations = run.show_recall(console) + run.show_language(console, folder)
    print(run.results(expectations).terminal())
    console.print(f"{time.monotonic() - began:.0f} s in all")
    failed = sum(not each.holds for each in expectations)
    if failed:
        raise UserError(f"{failed} of {len(expectations)} results are not as expected")
