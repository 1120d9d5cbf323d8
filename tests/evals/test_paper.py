"""The paper's language-model table, recomputed from its printed values."""

import pytest

from hypermlp.evals.suites import PAPER
from hypermlp.evals.table import ranks, standings
from hypermlp.paper.evaluations import PAPER_SCORES


@pytest.mark.parametrize("size", PAPER_SCORES)
def test_average_rank_and_number_of_bests_are_the_printed_ones(size):
    found = standings({model: row.scores for model, row in PAPER_SCORES[size].items()})
    for model, row in PAPER_SCORES[size].items():
        assert found[model].average_rank == pytest.approx(row.average_rank, abs=0.00501), model
        assert found[model].bests == row.bests, model


def test_one_digit_changed_shows():
    scores = {model: list(row.scores) for model, row in PAPER_SCORES["340M"].items()}
    scores["GLA"][0] = 0.2
    assert standings(scores)["GLA"].bests == 1
    assert standings(scores)["HyperMLP"].bests == PAPER_SCORES["340M"]["HyperMLP"].bests - 1


def test_ties_share_the_mean_of_their_ranks():
    assert ranks([0.3, 0.5, 0.5, 0.1]) == [3, 1.5, 1.5, 4]


def test_sixteen_columns():
    assert len(PAPER) == 16
    assert all(len(row.scores) == 16 for rows in PAPER_SCORES.values() for row in rows.values())
