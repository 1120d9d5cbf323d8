"""A run of all fuzzers, and its record.

Every lane is a process that runs all parts one after another; lanes have different cases.
"""

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fuzz.commands import Commands
from fuzz.core import die_with_parent
from fuzz.damage import Damage
from fuzz.decoding import Decoding
from fuzz.kills import Kills
from fuzz.layers import Layers
from fuzz.operators import Operators, TritonOperators
from fuzz.search import Search, Tally
from fuzz.serving import Serving
from fuzz.watched import Watched
from hypermlp.reporting.records import commit

PARTS = {
    part.name: part
    for part in (Commands, Damage, Kills, Serving, Decoding, TritonOperators, Layers, Operators)
}


def run_lane(number: int, args: argparse.Namespace) -> dict[str, Tally]:
    """Run all parts one after another, every second lane in the reverse order."""
    out, end = Path(args.out).resolve(), time.monotonic() + args.minutes * 60
    left = args.parts[:: -1 if number % 2 else 1]
    results = {}
    for place, name in enumerate(left):
        part = PARTS[name]
        watched = Watched(part, out / "work" / f"{name}-{number}")
        share = part.share / sum(PARTS[other].share for other in left[place:])
        cases = args.cases
        if cases is None and part.enough is not None:
            cases = int(part.enough * max(1.0, args.minutes / 120) / args.lanes) + 1
        try:
            search = Search(part, watched.check, f"{args.seed} {name} {number}", out)
            results[name] = tally = search.run((end - time.monotonic()) * share, cases)
        finally:
            watched.close()
        found = sum(one["count"] for one in tally.findings.values())
        print(f"{name}, lane {number}: {tally.counted['cases']} cases, {found} findings", flush=True)
    return results


def run(args: argparse.Namespace) -> int:
    out, began = Path(args.out).resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    print(f"seed {args.seed}, commit {commit()}, {args.minutes:g} minutes, results in {out}", flush=True)
    context = multiprocessing.get_context("spawn")
    results = {name: Tally() for name in args.parts}
    with ProcessPoolExecutor(args.lanes, mp_context=context, initializer=die_with_parent) as lanes:
        for lane in lanes.map(run_lane, range(args.lanes), [args] * args.lanes):
            for name, tally in lane.items():
                results[name].merge(tally)
    record = {"seed": args.seed, "commit": commit(), "minutes": round((time.monotonic() - began) / 60, 2)}
    parts = {name: vars(tally) for name, tally in results.items()}
    path = out / "summary.json"
    path.write_text(json.dumps(record | {"lanes": args.lanes, "parts": parts}, indent=2) + "\n")
    for name, tally in results.items():
        print(f"{name}: {tally.counted['cases']} cases")
        for kind, one in tally.findings.items():
            print(f"  {one['count']} x {kind}: {one['first'].strip().splitlines()[-1][:160]}")
            print(*(f"    {file}" for file in one["files"][:1]))
    print(f"summary: {path}")
    return 1 if any(tally.findings for tally in results.values()) else 0
