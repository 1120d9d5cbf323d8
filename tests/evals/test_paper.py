"""The paper's language-model table, recomputed from its printed scores."""

import pytest

from hypermlp.evals.suites import PAPER
from hypermlp.evals.table import ranks, standings
from hypermlp.paper.evaluations import PAPER_SCORES

SIZES = {row.size: [other for other in PAPER_SCORES if other.size == row.size] for row in PAPER_SCORES}


@pytest.mark.parametrize("size", SIZES)
def test_average_rank_and_number_of_bests_are_the_printed_ones(size):
    found = standings({row.model: row.scores for row in SIZES[size]})
    assert len(found) == 8
    for row in SIZES[size]:
        assert found[row.model].average_rank == pytest.approx(row.average_rank, abs=0.00501), row.model
        assert found[row.model].bests == row.bests, row.model


def test_one_digit_changed_shows():
    scores = {row.model: list(row.scores) for row in SIZES["340M"]}
    before = standings(scores)["HyperMLP"].bests
    scores["GLA"][0] = 0.2
    assert standings(scores)["GLA"].bests == 1
    assert standings(scores)["HyperMLP"].bests == before - 1


def test_ties_share_the_mean_of_their_ranks():
    assert ranks([0.3, 0.5, 0.5, 0.1]) == [3, 1.5, 1.5, 4]


def test_sixteen_columns():
    assert len(PAPER) == 16
    assert all(len(row.scores) == 16 for row in PAPER_SCORES)
