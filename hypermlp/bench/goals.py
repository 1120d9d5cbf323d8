"""The goals of the CPU kernels: ratios to fused softmax attention that the layer should reach, and whether it
does.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch

from hypermlp.bench.measure import Row, Work, interleaved_times, quartiles
from hypermlp.bench.op import Case, Computation, OpBench
from hypermlp.layers import Mixer
from hypermlp.reporting.table import Columns, Table
from hypermlp.testing import randomise_

LABEL = "G-cg-q-12o"
TIME, MEMORY = "time", "peak memory"


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
THREADS = {"at_most": 1 / 1.6, "aim": 1 / 1.85}  # of the time on one thread

COLUMNS: Columns = [
    ("goal", "{goal}"),
    (
        "ratio",
        lambda row: (
            f"{row['ratio']:.2f}"
            + (" ({:.2f} to {:.2f})".format(*row["ratio_quartiles"]) if row["ratio_quartiles"] else "")
        ),
    ),
    ("at most", "{at_most:.2f}"),
    ("aim", "{aim:.2f}"),
    ("reached", lambda row: "yes" if row["ratio"] <= row["at_most"] else "no"),
]


def table(rows: list[Row]) -> Table:
    """Return the table of rows that ``measure`` returned."""
    return Table.of(rows, COLUMNS)


def measure(*, rounds: int, seconds: float, report: Callable[[str], None]) -> list[Row]:
    """Return a row for each goal. ``report`` is called with the name of each case before it is measured.

    Each case has a process of its own: the memory that earlier cases leave to the allocator would decide how
    many pages a later one has to ask for.
    """
    measured: dict[tuple[Case, str], Row] = {}
    rows: list[Row] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for goal in GOALS:
            case = goal.case
            if (case, goal.what) not in measured:
                report(str(case))
                found = processes.submit(_measure_case, case, rounds, seconds).result()
                measured |= {(case, row["what"]): row for row in found}
            row = measured[case, goal.what]
            memory = goal.quantity == MEMORY
            ratio = row["ours_mib"] / row["softmax_mib"] if memory else row["ratio"]
            quarters = None if memory else row["ratio_quartiles"]
            rows.append(_row(goal.text, ratio, quarters, {"at_most": goal.at_most, "aim": goal.aim}))
        report("threads")
        ratios = processes.submit(_measure_threads, rounds, seconds).result()
    name = "time, HyperMLP layer forward+backward, B=1, T=2048, D=256, one head, 2 threads over 1"
    return [*rows, _row(name, median(ratios), quartiles(ratios), THREADS)]


def _measure_case(case: Case, rounds: int, seconds: float) -> list[Row]:
    torch.set_num_threads(2)
    return OpBench(LABEL, case, "native", rounds=rounds, seconds=seconds).rows()


def _measure_threads(rounds: int, seconds: float) -> list[float]:
    """Return the ratios of the time on two threads to that on one."""
    times = interleaved_times(
        {str(threads): _on_threads(threads) for threads in (1, 2)}, rounds=rounds, seconds=seconds
    )
    return [two / one for one, two in zip(times["1"], times["2"], strict=True)]


def _row(goal: str, ratio: float, quarters: tuple[float, float] | None, limits: dict[str, float]) -> Row:
    return {"goal": goal, "ratio": ratio, "ratio_quartiles": quarters, **limits}


def _on_threads(threads: int) -> Work:
    mixer = Mixer.from_label("R-cg-q-12o", hidden_size=256, max_length=2048, num_heads=1)
    randomise_(mixer, scale=0.02)
    mixer.backend = "native"
    x = torch.randn(1, 2048, 256, requires_grad=True)
    work = Computation(lambda: mixer(x), [x, *mixer.parameters()]).forward_backward()

    def run() -> None:
        torch.set_num_threads(threads)
        work()

    return run
