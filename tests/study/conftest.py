"""Studies whose results are made up: no training."""

import dataclasses
import math
import random

import pytest

from hypermlp.jobs.cells import record_path
from hypermlp.label import PAPER_ROWS
from hypermlp.mad.protocol import GRIDS, cells
from hypermlp.reporting.records import new_record, write_record
from hypermlp.study.protocol import ROWS, SIZES, lm_cell, lm_cells
from hypermlp.study.reading import PAPER_LABEL

BEST = 8e-3


def _write(folder, cell, results):
    write_record(record_path(folder, cell), new_record(cell.kind, dataclasses.asdict(cell), results))


@pytest.fixture(scope="session")
def write_lm():
    """``write_lm(folder, cell, loss)`` writes the record of a language model; loss None means divergence.

    Further results may follow.
    """

    def write(folder, cell, loss, **more):
        if loss is None:
            _write(folder, cell, {"loss": None, "diverged": "made up", "seconds": 1.0})
            return
        curve = [[step, loss + 3 * math.exp(-step / 100)] for step in range(50, 601, 50)]
        results = {"loss": loss, "curves": {"validation": curve}, "data_digest": "d"}
        costs = {"parameters": 1_000_000, "forward_flops_per_token": 2_000_000, "tokens": 5_000_000}
        _write(folder, cell, results | costs | more)

    return write


@pytest.fixture(scope="session")
def made_up(tmp_path_factory, write_lm):
    """Losses like the paper's, with a little noise, all best at the rate 8e-3; MAD for one row."""
    folder, noise, mini = tmp_path_factory.mktemp("study"), random.Random(0), SIZES["mini"]
    for row in ROWS:
        for rate in mini.rates:
            write_lm(folder, lm_cell(mini, row, mini.tuning_seed, rate), 3 + abs(rate - BEST))
    for cell in lm_cells(mini, ROWS, dict.fromkeys(ROWS, BEST)):
        paper = PAPER_ROWS[PAPER_LABEL.get(cell.mixer, cell.mixer)].loss
        write_lm(folder, cell, paper + noise.gauss(0, 1e-3))
    for cell in cells("R-12o!", GRIDS["mini"], ["compression", "memorization"]):
        _write(folder / "mad", cell, {"score": 0.5})
    return folder
