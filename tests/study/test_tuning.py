"""Every row gets its own learning rate, chosen with a seed that is not reported."""

import dataclasses
import math

import pytest

from hypermlp.cli import main
from hypermlp.jobs.cells import recorded
from hypermlp.study import protocol
from hypermlp.study.protocol import SIZES, lm_cell, lm_cells
from hypermlp.study.tuning import best_rate, beyond_edge, tuned_rates

pytestmark = pytest.mark.thorough

BEST = {"S-p": 8e-3, "G-cg-q-12o": 6.4e-2, "S-pc": 2e-3}


def parabola(cell):
    """A loss with its minimum at BEST, on a logarithmic scale."""
    return {"loss": math.log2(cell.rate / BEST[cell.mixer]) ** 2}


def test_a_best_rate_at_the_edge_widens_the_grid():
    asked = []

    def train(cells):
        asked.extend(cells)
        return [(cell, parabola(cell)) for cell in cells]

    assert tuned_rates(SIZES["headline"], list(BEST), train) == BEST
    assert {cell.seed for cell in asked} == {SIZES["headline"].tuning_seed}
    rates = {row: sorted(cell.rate for cell in asked if cell.mixer == row) for row in BEST}
    assert rates["S-p"] == [4e-3, 8e-3, 1.6e-2, 3.2e-2]
    assert rates["G-cg-q-12o"] == [4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128]
    assert rates["S-pc"] == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]


def test_a_size_that_does_not_widen_stays_in_its_grid():
    assert tuned_rates(SIZES["mini"], ["S-pc"], lambda cells: [(cell, parabola(cell)) for cell in cells]) == {
        "S-pc": 4e-3
    }


def test_a_size_without_rates_trains_nothing():
    assert tuned_rates(SIZES["full"], ["S-p"], lambda cells: pytest.fail("trained")) == {}


def test_a_diverged_rate_is_not_chosen_and_its_side_not_widened():
    assert best_rate({4e-3: 2.0, 8e-3: math.inf}) == 4e-3
    assert beyond_edge({4e-3: 2.0, 8e-3: 1.5, 1.6e-2: math.inf}) is None


def test_the_tuning_seed_is_not_reported_and_claimed_rows_have_a_further_one():
    mini = list(lm_cells(SIZES["mini"], ["S-p", "R-g-q-12o"], {"S-p"}, {"S-p": 4e-3, "R-g-q-12o": 8e-3}))
    assert [(cell.mixer, cell.seed, cell.rate) for cell in mini] == [
        ("S-p", 2, 4e-3),
        ("R-g-q-12o", 2, 8e-3),
        ("S-p", 3, 4e-3),
        ("R-g-q-12o", 3, 8e-3),
        ("S-p", 4, 4e-3),
    ]
    headline = list(lm_cells(SIZES["headline"], list(SIZES["headline"].rows), set()))
    seeds = {row: [cell.seed for cell in headline if cell.mixer == row] for row in SIZES["headline"].rows}
    assert seeds == {
        "G-cg-q-12o": [2, 3, 4, 5, 6],
        "S-p": [2, 3, 4, 5, 6],
        "S-pc": [2, 3, 4, 5, 6],
        "R-cg-q-12o": [2, 3, 4],
    }


@pytest.mark.usefixtures("server")
def test_study_run_tunes_then_trains_and_evaluates(tmp_path, monkeypatch, capsys):
    size = dataclasses.replace(SIZES["smoke"], rates=(1e-3, 1e-1), seeds=(2,), evaluate=True, mad="")
    size = dataclasses.replace(
        size, changes=(*size.changes, "data.context=256", "training.batch_tokens=1024")
    )
    monkeypatch.setitem(protocol.SIZES, "smoke", size)
    assert (
        main(["study", "run", "--size", "smoke", "--labels", "S-p", "--out", str(tmp_path), "--threads", "1"])
        == 0
    )
    tuned = {rate: recorded(tmp_path, lm_cell(size, "S-p", 1, rate))["loss"] for rate in size.rates}
    chosen = best_rate(tuned)
    assert f"learning rates: S-p {chosen:g}" in capsys.readouterr().err
    reported = recorded(tmp_path, lm_cell(size, "S-p", 2, chosen))
    assert reported["local"]["bits per byte"]["value"] > 1
    assert [path.name for path in (tmp_path / "models" / "lm").iterdir()] == [
        next((tmp_path / "lm").glob("S-p-2-*.json")).stem
    ]


@pytest.mark.usefixtures("server")
def test_a_training_that_diverges_is_recorded_as_such(tmp_path, monkeypatch):
    size = dataclasses.replace(SIZES["smoke"], rates=(1e-3, 1e9), seeds=(2,), mad="")
    size = dataclasses.replace(size, changes=(*size.changes, "training.steps=6", "training.explosion=1.5"))
    monkeypatch.setitem(protocol.SIZES, "smoke", size)
    assert (
        main(["study", "run", "--size", "smoke", "--labels", "S-p", "--out", str(tmp_path), "--threads", "1"])
        == 0
    )
    assert recorded(tmp_path, lm_cell(size, "S-p", 1, 1e9))["loss"] is None
    assert recorded(tmp_path, lm_cell(size, "S-p", 2, 1e-3))["loss"] > 0
