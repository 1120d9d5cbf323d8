"""Baselines run through the benchmark like labels."""

import pytest

from hypermlp import mad
from hypermlp.layers import BASELINES
from hypermlp.layers.registry import OURS, chosen_mixers
from hypermlp.mad.report import PUBLISHED_BASELINES, Scores, published_value


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_train_on_recall(name):
    result = mad.benchmark(name, grid="smoke", tasks="in-context-recall")
    assert 0 <= result.scores[name]["in-context-recall"] <= 1


def test_all_means_ours_and_every_baseline():
    assert chosen_mixers(["all"]) == [*OURS, *BASELINES]
    assert chosen_mixers(["S-p", "gla", "S-p"]) == ["S-p", "gla"]


def test_published_scores_stand_beside_ours():
    assert str(Scores({"gla": {"in-context-recall": 0.5}})).endswith("| gla | 50.0 (80.8) |")
    averages = {name: round(published_value(name), 1) for name in PUBLISHED_BASELINES}
    assert averages == {"softmax": 74.5, "mamba": 69.3, "gla": 60.0, "deltanet": 71.8}, "as printed"
    assert published_value("rwkv7", "compression") is None
