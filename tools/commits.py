"""The layer of this source tree against the layer of another commit, interleaved.

``hypermlp bench op --against COMMIT`` compares them.
"""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import hypermlp
from hypermlp.bench.measure import WARMUPS, Row, quartiles
from hypermlp.commands.shared import Args
from hypermlp.config import MixerConfig
from hypermlp.errors import UserError

ROOT = Path(hypermlp.__file__).parents[1]
WORKER = Path(__file__).with_name("commit_worker.py")
PAUSE = 0.01  # seconds between timings: the threads of the other process go to sleep


def run(args: Args) -> list[Row]:
    """Compare the layers for ``hypermlp bench op --against COMMIT``."""
    MixerConfig.from_label(args.label, hidden_size=args.hidden, max_length=args.length)  # raises if not valid
    settings = {name: getattr(args, name) for name in ("label", "batch", "length", "hidden", "rounds")}
    settings["threads"] = args.threads or torch.get_num_threads()
    with worktree(args.against) as tree:
        print(f"{args.label}: this tree against {args.against}, {4 * args.seconds:.0f} s at most", flush=True)
        return compare(tree, settings, seconds=args.seconds)


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check the commit out into a temporary git worktree. Raise UserError if that is not possible."""
    parsed = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if parsed.returncode != 0:
        reason = parsed.stderr.strip() or "it names no commit of this repository"
        raise UserError(f"--against is {commit!r}: {reason}; pass a commit of the git checkout in {ROOT}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        added = _git("worktree", "add", "--detach", "--force", str(tree), parsed.stdout.strip())
        if added.returncode != 0:
            raise UserError(f"--against is {commit!r}: git worktree failed: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(f"--against needs git: {error}") from error


class Worker:
    """A process that times the layer of one source tree."""

    def __init__(self, tree: Path):
        self.tree = tree
        environment = os.environ | {"PYTHONPATH": str(tree)}
        command = [sys.executable, "-P", str(WORKER)]
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def setup(self, settings: dict[str, Any]) -> list[str]:
        """Prepare the works and return their names. Raise if the process uses another source tree."""
        answer = self._request({"setup": settings})
        if not Path(answer["package"]).is_relative_to(self.tree):
            raise UserError(f"the package of {self.tree} cannot be imported; found {answer['package']}")
        return list(answer["works"])

    def seconds(self, name: str) -> float:
        return float(self._request({"run": name})["seconds"])

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"the worker in {self.tree} ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(tree: Path, settings: dict[str, Any], *, seconds: float) -> list[Row]:
    """Return a row for every work: medians of both trees, and the ratio with its quartiles and the 95 %
    interval of its median.

    ``settings`` are the arguments of ``commit_worker.works``, and ``rounds``. Every round times both trees,
    in alternating order, and gives one ratio. A work has at most ``rounds`` rounds, and no further one (after
    the third) once ``seconds`` have passed.
    """
    with Worker(ROOT) as ours, Worker(tree) as theirs:
        sizes = {key: value for key, value in settings.items() if key != "rounds"}
        names = ours.setup(sizes)
        theirs.setup(sizes)
        return [_compare(name, ours, theirs, settings, seconds) for name in names]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from order statistics: it assumes no distribution.

    With fewer than six values it is their whole range, which then covers less than 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside, beyond = 0, math.comb(count, 0) / 2**count  # beyond: the chance that the median is below
    while beyond + math.comb(count, outside + 1) / 2**count <= 0.025:
        outside += 1
        beyond += math.comb(count, outside) / 2**count
    return ordered[outside], ordered[count - 1 - outside]


def _compare(name: str, ours: Worker, theirs: Worker, settings: dict[str, Any], seconds: float) -> Row:
    for worker in [ours, theirs] * WARMUPS:
        worker.seconds(name)
    times: dict[Worker, list[float]] = {ours: [], theirs: []}
    began = time.monotonic()
    for done in range(settings["rounds"]):
        if done >= 3 and time.monotonic() - began > seconds:
            break
        for worker in (ours, theirs) if done % 2 else (theirs, ours):
            time.sleep(PAUSE)
            times[worker].append(worker.seconds(name))
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    return {
        "what": name,
        **{key: settings[key] for key in ("batch", "length", "hidden", "threads")},
        "ours_ms": 1e3 * statistics.median(times[ours]),
        "theirs_ms": 1e3 * statistics.median(times[theirs]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "ratio_interval": median_interval(ratios),
        "ratios": len(ratios),
    }
