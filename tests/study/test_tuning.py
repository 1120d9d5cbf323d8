"""The learning rate of a row is chosen with a tuning seed."""

import math

import pytest

from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.tuning import best_rate, beyond_edge, tuned_rates, tuning_table

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
    found = tuned_rates(SIZES["mini"], ["S-pc"], lambda cells: [(cell, parabola(cell)) for cell in cells])
    assert found == {"S-pc": 4e-3}


def test_a_size_without_rates_trains_nothing():
    assert tuned_rates(SIZES["full"], ["S-p"], lambda cells: pytest.fail("trained")) == {}


def test_a_diverged_rate_is_not_chosen_and_its_side_not_widened():
    assert best_rate({4e-3: 2.0, 8e-3: math.inf}) == 4e-3
    assert beyond_edge({4e-3: 2.0, 8e-3: 1.5, 1.6e-2: math.inf}) is None


def test_the_table_of_study_tune_shows_what_diverged():
    losses = {(4e-3, "S"): 2.0, (4e-3, "R"): 3.0, (8e-3, "S"): 1.0, (8e-3, "R"): None}
    cells = {key: lm_cell(SIZES["mini"], key[1], 1, key[0]) for key in losses}
    table = tuning_table((cells[key], {"loss": loss}) for key, loss in losses.items())
    assert table.columns == ["learning rate", "S", "R", "mean"]
    assert [line[1:] for line in table.rows] == [
        ["2.0000", "3.0000", "2.5000"],
        ["1.0000", "diverged", "diverged"],
    ]
