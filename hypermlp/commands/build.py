"""``hypermlp build``: builds the CPU kernels ahead of their first use, and reports."""

import argparse
import time

from hypermlp.errors import UserError
from hypermlp.ops import build, native


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="build even if a library is there")


def main(args: argparse.Namespace) -> None:
    try:
        path = build.library_path()
        if args.force:
            path.unlink(missing_ok=True)
        was_there = path.exists()
        began = time.monotonic()
        build.build(quiet=True)
        native.load()
    except build.BuildError as error:
        raise UserError(error) from error
    print(f"library   {path}")
    print(f"flags     {' '.join((*build.FLAGS, *build.extra_flags()))}")
    print(
        "state     "
        + ("it was there" if was_there else f"built in {time.monotonic() - began:.1f} s")
        + ", loads, backend 'native' is available"
    )
