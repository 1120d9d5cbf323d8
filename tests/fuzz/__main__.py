"""``python -m fuzz``: run the fuzzers, or replay one finding.

    PYTHONPATH=tests python -m fuzz run --minutes 30
    PYTHONPATH=tests python -m fuzz replay fuzz-results/findings/operator-....json

``run`` writes summary.json and the reproductions of findings to the folder ``--out``, and ends with status 1
if there is a finding. ``replay`` does if the case still fails.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from fuzz.campaign import PARTS, run
from fuzz.core import ENVIRONMENT, Finding, failure
from fuzz.watched import Watched


def replay(args: argparse.Namespace) -> int:
    record = json.loads(Path(args.file).read_text())
    with tempfile.TemporaryDirectory(prefix="hypermlp-fuzz-") as folder:
        watched = Watched(PARTS[record["part"]], Path(folder))
        result = failure(watched.check, record["case"])
        watched.close()
    if isinstance(result, Finding):
        print(f"{result.kind}\n{result.message}")
        return 1
    print("the case passes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run the fuzzers")
    one.add_argument("--minutes", type=float, default=30)
    one.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="default: from the clock; the summary has it"
    )
    one.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    one.add_argument("--cases", type=int, help="largest number of cases of each part and lane")
    one.add_argument("--lanes", type=int, default=2, help="processes at once (default: 2)")
    one.add_argument("--out", default="fuzz-results", help="default: fuzz-results")
    one.set_defaults(main=run)
    one = commands.add_parser("replay", help="run the case of a finding again")
    one.add_argument("file")
    one.set_defaults(main=replay)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    return args.main(args)


if __name__ == "__main__":
    sys.exit(main())
