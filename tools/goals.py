"""The goals of the CPU kernels: ratios that a layer should reach, most of them to softmax attention.

``hypermlp bench op --goals`` measures them.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from hypermlp.bench.gate import check_backend
from hypermlp.bench.measure import Row, Work, interleaved_times, quartiles
from hypermlp.bench.op import Case, Computation, OpBench
from hypermlp.commands.shared import Args
from hypermlp.layers import Mixer
from hypermlp.testing import randomise_

LABEL = "G-cg-q-12o"
TIME, MEMORY = "time", "peak memory"
PROCESSES = 5  # that measure each case


@dataclass(frozen=True)
class Goal:
    """A ratio of ours to softmax attention in one row of ``hypermlp bench op``, which should be small."""

    what: str
    batch: int
    length: int
    hidden: int
    at_most: float
    aim: float
    quantity: str = TIME

    @property
    def case(self) -> Case:
        return Case(self.batch, self.length, self.hidden, 2, (self.what.split()[0],))

    @property
    def text(self) -> str:
        return f"{self.quantity}, {self.what}, B={self.batch}, T={self.length}, D={self.hidden}"


GOALS = (
    Goal("layer forward", 2, 1024, 768, 0.86, 0.80),
    Goal("layer forward+backward", 2, 1024, 768, 0.88, 0.82),
    Goal("core forward+backward", 1, 8192, 768, 0.82, 0.75),
    Goal("layer forward+backward", 2, 128, 768, 0.98, 0.92),
    Goal("layer forward+backward", 2, 1024, 256, 0.93, 0.85),
    Goal("layer forward+backward", 2, 1024, 128, 1.08, 0.95),
    Goal("layer forward+backward", 32, 128, 128, 1.12, 1.00),
    Goal("layer forward", 2, 1024, 768, 1.4, 1.2, MEMORY),
    Goal("layer forward+backward", 1, 8192, 768, 1.2, 1.1, MEMORY),
)


@dataclass(frozen=True)
class Pair:
    """A ratio of the times of two computations of ours, the second to the first, which should be small."""

    text: str
    works: Callable[[], tuple[Work, Work]]
    at_most: float
    aim: float


def on_threads(length: int = 2048, hidden: int = 256) -> tuple[Work, Work]:
    """Return the training of a HyperMLP layer on one thread and on two."""
    mixer = Mixer.from_label("R-cg-q-12o", hidden_size=hidden, max_length=length, num_heads=1)
    randomise_(mixer, scale=0.02)
    mixer.backend = "native"
    x = torch.randn(1, length, hidden, requires_grad=True)
    work = Computation(lambda: mixer(x), [x, *mixer.parameters()]).forward_backward()

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        work()

    return partial(run, 1), partial(run, 2)


def decoding(batch: int = 8, length: int = 4096, hidden: int = 768) -> tuple[Work, Work]:
    """Return the decoding of one token after ``length`` positions by a float32 and by a bfloat16 layer."""
    torch.set_num_threads(2)

    def work(dtype: torch.dtype) -> Work:
        layer = Mixer.from_label(LABEL, hidden_size=hidden, max_length=length + 1).to(dtype)
        state, x = layer.new_state(batch), torch.randn(batch, length, hidden, dtype=dtype)

        @torch.no_grad()
        def decode() -> None:
            state.crop(length)
            layer(x[:, -1:], state=state)

        with torch.no_grad():
            layer(x, state=state)
        return decode

    return work(torch.float32), work(torch.bfloat16)


PAIRS = (
    Pair(
        "time, HyperMLP layer forward+backward, B=1, T=2048, D=256, one head, 2 threads over 1",
        on_threads,
        at_most=1 / 1.6,
        aim=1 / 1.85,
    ),
    Pair(
        "time, layer decode one token, B=8, T=4096, D=768, bfloat16 over float32",
        decoding,
        at_most=0.70,
        aim=0.60,
    ),
)


def run(args: Args) -> list[Row]:
    """Measure the goals for ``hypermlp bench op --goals``."""
    print(f"native: {check_backend('native')} cases equal the reference", flush=True)
    return measure(
        rounds=args.rounds,
        seconds=args.seconds,
        report=lambda case: print(case, file=sys.stderr, flush=True),
    )


def measure(*, rounds: int, seconds: float, report: Callable[[str], None]) -> list[Row]:
    """Return a row for each goal. ``report`` is called with the name of each case before it is measured.

    Each case is measured in several processes of its own, each with ``rounds`` and ``seconds``, and the
    median of their ratios counts. The place of a process in memory changes a ratio by several percent, and so
    would the memory that earlier cases leave to the allocator.
    """
    rows: list[Row] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:

        def in_the_middle(function: Callable[..., list[Row]], *arguments: Any) -> dict[str, Row]:
            """Return the rows of the process with the median ratio, by what they measure."""
            measured: dict[str, list[Row]] = {}
            for _ in range(PROCESSES):
                for row in processes.submit(function, *arguments, rounds, seconds).result():
                    measured.setdefault(row["what"], []).append(row)
            by_ratio = (sorted(same, key=lambda row: row["ratio"]) for same in measured.values())
            return {row["what"]: row for row in (same[PROCESSES // 2] for same in by_ratio)}

        cases: dict[Case, dict[str, Row]] = {}
        for goal in GOALS:
            if goal.case not in cases:
                report(str(goal.case))
                cases[goal.case] = in_the_middle(_measure_case, goal.case)
            row = cases[goal.case][goal.what]
            if goal.quantity == MEMORY:
                row = {"ratio": row["ours_mib"] / row["softmax_mib"], "ratio_quartiles": None}
            rows.append(_judged(goal, row))
        for pair in PAIRS:
            report(pair.text)
            rows += [_judged(pair, row) for row in in_the_middle(_measure_pair, pair.works).values()]
    return rows


def _measure_case(case: Case, rounds: int, seconds: float) -> list[Row]:
    torch.set_num_threads(2)
    return OpBench(LABEL, case, "native", rounds=rounds, seconds=seconds).rows()


def _measure_pair(works: Callable[[], tuple[Work, Work]], rounds: int, seconds: float) -> list[Row]:
    """Return one row, with the ratio of the time of the second work to that of the first."""
    first, second = works()
    times = interleaved_times({"first": first, "second": second}, rounds=rounds, seconds=seconds)
    ratios = [b / a for a, b in zip(times["first"], times["second"], strict=True)]
    return [{"what": "pair", "ratio": median(ratios), "ratio_quartiles": quartiles(ratios)}]


def _judged(goal: Goal | Pair, row: Row) -> Row:
    quarters = row["ratio_quartiles"]
    limits = {"at_most": goal.at_most, "aim": goal.aim}
    return {"goal": goal.text, "ratio": row["ratio"], "ratio_quartiles": quarters, **limits}
