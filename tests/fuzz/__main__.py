"""``python -m fuzz``: run the fuzzers, or replay one finding.

    PYTHONPATH=tests python -m fuzz run --minutes 30
    PYTHONPATH=tests python -m fuzz replay fuzz-results/findings/operator-....json

``run`` writes summary.json and one reproduction per finding to the folder ``--out``, and ends with status 1
if there is a finding. ``replay`` does if the case still fails.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from fuzz.campaign import Job, merged, work
from fuzz.core import failure
from fuzz.parts import PARTS, SHARES, enough
from hypermlp.reporting.records import commit


def run(args) -> int:
    out = Path(args.out).resolve()
    parts = args.parts or list(SHARES)
    out.mkdir(parents=True, exist_ok=True)
    seed = args.seed if args.seed is not None else time.time_ns() % 2**31
    print(f"seed {seed}, commit {commit()}, {args.minutes:g} minutes, results in {out}", flush=True)
    jobs: list[Job] = []
    began = time.monotonic()

    def lane(number: int) -> None:
        left = parts if number % 2 == 0 else parts[::-1]
        for place, part in enumerate(left):
            job = Job(part, number, args.lanes, seed, out)
            jobs.append(job)
            share = SHARES[part] / sum(SHARES[other] for other in left[place:])
            seconds = (began + args.minutes * 60 - time.monotonic()) * share
            job.run(seconds, args.cases or enough(part, args.minutes, args.lanes))
            found = job.summary()
            print(
                f"{part}, lane {number}: {found['counted']['cases']} cases, "
                f"{sum(one['count'] for one in found['findings'].values())} findings",
                flush=True,
            )

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(args.lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = {part: merged([job.summary() for job in jobs if job.part == part]) for part in parts}
    record = {"seed": seed, "commit": commit(), "minutes": round((time.monotonic() - began) / 60, 2)}
    path = out / "summary.json"
    path.write_text(json.dumps(record | {"lanes": args.lanes, "parts": results}, indent=2) + "\n")
    return show(results, path)


def show(results, path) -> int:
    """Print the findings; return the exit status."""
    for part, result in results.items():
        print(f"{part}: {result['counted'].get('cases', 0)} cases")
        for kind, found in result["findings"].items():
            print(f"  {found['count']} x {kind}: {found['first'].strip().splitlines()[-1][:160]}")
            for file in found["files"][:1]:
                print(f"    {file}")
    print(f"summary: {path}")
    return 1 if any(result["findings"] for result in results.values()) else 0


def replay(args) -> int:
    record = json.loads(Path(args.file).read_text())
    with tempfile.TemporaryDirectory(prefix="hypermlp-fuzz-") as folder:
        part = PARTS[record["part"]](Path(folder))
        try:
            found = failure(part, record["case"])
        finally:
            part.close()
    print("the case passes" if found is None else f"{found.kind}\n{found.message}")
    return 0 if found is None else 1


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return work(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="run the fuzzers")
    one.add_argument("--minutes", type=float, default=30)
    one.add_argument("--seed", type=int, help="default: from the clock; the summary records it")
    one.add_argument("--parts", nargs="+", choices=list(SHARES), help="default: all")
    one.add_argument("--cases", type=int, help="largest number of cases of each part and lane")
    one.add_argument("--lanes", type=int, default=2, help="processes at once (default: 2)")
    one.add_argument("--out", default="fuzz-results", help="default: fuzz-results")
    one.set_defaults(main=run)
    one = commands.add_parser("replay", help="run the case of a finding again")
    one.add_argument("file")
    one.set_defaults(main=replay)
    args = parser.parse_args()
    return args.main(args)


if __name__ == "__main__":
    sys.exit(main())
