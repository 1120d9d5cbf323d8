"""Numbers that can be checked by hand, or from a table."""

import math

import pytest

from hypermlp.study.claims import CLAIMED, CLAIMS, REFUTED, SUPPORTED, UNDECIDED, judge
from hypermlp.study.intervals import paired_effects, ranks, spearman, t975
from hypermlp.study.protocol import ROWS, TUNING_ROWS


def test_ranks_share_what_is_equal():
    assert list(ranks([0.5, 0.1, 0.5, 0.9])) == [2.5, 1, 2.5, 4]


def test_rank_correlation():
    found = spearman([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17])
    assert found.value == pytest.approx(-29 / 165)  # the textbook example
    assert found.low < found.value < found.high
    assert spearman([1, 2, 3, 4, 5], [10, 20, 30, 40, 50]).value == pytest.approx(1)
    assert spearman([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]).value == pytest.approx(-1)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (10, 2.228), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)]
)
def test_students_t(freedom, value):
    assert t975(freedom) == pytest.approx(value, abs=1.5e-3)


def test_one_pair_is_the_usual_interval():
    (found,) = paired_effects([[1.0, 2.0, 3.0]])
    assert found.value == 2
    assert found.high - found.value == pytest.approx(4.303 * 1 / math.sqrt(3))


def test_pairs_share_their_variance():
    first, second, none = paired_effects([[0.0, 2.0], [10.0, 14.0], []])
    half = 4.303 * math.sqrt((1 + 1 + 4 + 4) / 2) / math.sqrt(2)
    assert first == pytest.approx((1, 1 - half, 1 + half))
    assert second == pytest.approx((12, 12 - half, 12 + half))
    assert none is None


def test_one_seed_has_no_interval():
    (found,) = paired_effects([[0.5]])
    assert found == (0.5, -math.inf, math.inf)


def losses(**values):
    """Two seeds of every claimed row; ``values`` by label, with - and ! written as _ and x."""
    named = {label: values.get(label.replace("-", "_").replace("!", "x"), 2.0) for label in CLAIMED}
    return {
        label: {1: value - 1e-4, 2: value + 1e-4 * (i % 3)}
        for i, (label, value) in enumerate(sorted(named.items()))
    }


def test_verdicts():
    softmax, mixing, lag, *_ = judge(losses(R_cg_q=2.5, G_cg_q=2.4, R_c=2.04, R_12x=3.0, G_12x=1.9, S_c=2.04))
    assert softmax.verdict == SUPPORTED  # all pairs within the margin
    assert mixing.verdict == SUPPORTED
    assert lag.verdict == REFUTED  # one pair speaks against it
    assert [effect.verdict for effect in lag.effects] == [SUPPORTED, REFUTED]


def test_softmax_is_essential_if_relu_is_far_off():
    assert judge(losses(R_c=2.2))[0].verdict == REFUTED


def test_no_difference_decides_nothing():
    assert judge(losses())[1].verdict == UNDECIDED


def test_a_pair_that_was_not_run_leaves_the_claim_open():
    found = losses(R_12x=3.0, G_12x=3.0)
    del found["G-12o!"]
    assert judge(found)[2].verdict == UNDECIDED
    assert len(judge(found)[2].effects) == 1
    assert judge(found)[2].missing == (("G-12!", "G-12o!"),)


def test_the_claims_use_rows_of_the_study_and_none_that_the_rate_was_tuned_on():
    assert len(CLAIMS) == 6
    assert set(ROWS) >= CLAIMED
    assert not CLAIMED & set(TUNING_ROWS)
