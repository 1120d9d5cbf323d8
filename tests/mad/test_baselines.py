"""Every peer runs through the benchmark as a label does."""

import pytest

from hypermlp import mad
from hypermlp.layers import BASELINES


@pytest.mark.parametrize("name", BASELINES)
def test_peers_train_on_recall(name):
    table = mad.benchmark(name, grid="smoke", tasks="in-context-recall")
    assert 0 <= table.scores[name]["in-context-recall"] <= 1
