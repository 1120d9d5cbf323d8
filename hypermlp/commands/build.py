"""``hypermlp build``: build the CPU kernels before their first use, and report."""

import time

from hypermlp.commands.shared import Args, Argument, command
from hypermlp.ops import build, native, shipped


@command(
    Argument("--force", action="store_true", help="build even if the library exists"),
)
def main(args: Args) -> None:
    library = None if args.force else shipped.find()
    if library is not None and native.load() == library.path:
        print(f"library   {native.origin()}")
        print("state     nothing to build, backend 'native' is available; set CXX to build anyway")
        return
    existed = build.library_path().exists() and not args.force
    began = time.monotonic()
    path = build.build(quiet=True, force=args.force)
    seconds = time.monotonic() - began
    native.load()
    print(f"library   {path}")
    print(f"flags     {' '.join(build.flags())}")
    state = "it existed" if existed else f"built in {seconds:.1f} s"
    print(f"state     {state}, loads, backend 'native' is available")
