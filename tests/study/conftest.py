"""A study whose results are made up: no training."""

import math
import random

import pytest

from hypermlp.jobs.cells import record_path
from hypermlp.label import PAPER_ROWS
from hypermlp.mad.protocol import GRIDS, cells
from hypermlp.reporting.records import new_record, write_record
from hypermlp.study.claims import CLAIMED
from hypermlp.study.protocol import ROWS, SIZES, lm_cells
from hypermlp.study.summary import PAPER_LABEL


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """Losses like the paper's, with a little noise; MAD for one row."""
    folder, noise = tmp_path_factory.mktemp("study"), random.Random(0)
    for cell in lm_cells(SIZES["mini"], ROWS, CLAIMED):
        end = PAPER_ROWS[PAPER_LABEL.get(cell.mixer, cell.mixer)].loss + noise.gauss(0, 1e-3)
        curve = [[step, end + 3 * math.exp(-step / 100)] for step in range(50, 601, 50)]
        result = {
            "loss": end,
            "curves": {"validation": curve},
            "parameters": 1_000_000,
            "forward_flops_per_token": 2_000_000,
        }
        write_record(
            record_path(folder, cell), new_record(cell.kind, cell.__dict__, {**result, "data_digest": "d"})
        )
    for cell in cells("R-12o!", GRIDS["smoke"], ["compression", "memorization"]):
        settings = {**cell.__dict__, "training": cell.training.__dict__}
        write_record(record_path(folder / "mad", cell), new_record(cell.kind, settings, {"score": 0.5}))
    return folder
