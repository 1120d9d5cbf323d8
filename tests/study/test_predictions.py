"""The seventh claim: mixing helps most on the tasks for which the paper predicts it."""

import math

import pytest

from hypermlp.mad.tasks import TASKS
from hypermlp.paper.predictions import GAIN_LEVELS, PREDICTED_GAIN
from hypermlp.study.claims import NOT_RUN, REFUTED, SUPPORTED, UNDECIDED
from hypermlp.study.intervals import rank_correlation
from hypermlp.study.predictions import gains, judge_predictions, mixing_pairs, paper_gains


def scores(sign):
    """Gains as predicted, with a little noise that differs between the pairs; ``sign`` turns them round."""
    found = {}
    for number, (plain, mixed) in enumerate(mixing_pairs()):
        found[plain] = dict.fromkeys(TASKS, 0.5)
        found[mixed] = {
            task: 0.5 + sign * (0.1 * GAIN_LEVELS.index(level) + 0.01 * ((number + place) % 3))
            for place, (task, level) in enumerate(PREDICTED_GAIN.items())
        }
    return found


def test_there_is_a_prediction_for_every_task():
    assert set(PREDICTED_GAIN) == set(TASKS)
    assert set(PREDICTED_GAIN.values()) == set(GAIN_LEVELS)


def test_pairs_differ_in_the_mix_alone_and_share_no_row():
    pairs = mixing_pairs()
    assert pairs == [
        ("R-c", "R-c-12o!"),
        ("R-cg-q", "R-cg-q-12o"),
        ("G-cg-q", "G-cg-q-12o"),
        ("R", "R-12o!"),
    ]
    assert len({row for pair in pairs for row in pair}) == 8


def test_correlation_of_equal_values_is_zero():
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0
    assert rank_correlation([1, 2, 3], [1, 5, 9]) == pytest.approx(1)


@pytest.mark.parametrize(("sign", "verdict"), [(1, SUPPORTED), (-1, REFUTED)])
def test_verdicts(sign, verdict):
    found = judge_predictions(scores(sign))
    assert found.verdict == verdict
    assert found.missing == ()
    (effect,) = found.effects
    assert sign * effect.effect.value > 0.8
    assert effect.name == "mean of 4 of 4 pairs"


def test_a_missing_pair_leaves_the_claim_undecided():
    known = scores(1)
    del known["R"]["compression"]
    found = judge_predictions(known)
    assert found.verdict == UNDECIDED
    assert found.missing == (("R", "R-12o!"),)
    assert "missing (" in found.details.markdown()
    assert judge_predictions({}).verdict == NOT_RUN
    one = {row: known[row] for row in ("R-c", "R-c-12o!")}
    assert judge_predictions(one).effects[0].effect.high == math.inf


def test_the_papers_own_gains():
    found = paper_gains()["R-cg-q", "R-cg-q-12o"]
    assert found["fuzzy-in-context-recall"] == pytest.approx(0.3019)
    assert found["in-context-recall"] == pytest.approx(-0.0001)
    assert gains({}) == {}
