"""The goals of the CPU kernels: every goal gets a row, and the table says which ones are reached."""

from functools import partial

import pytest
import torch

import hypermlp
from hypermlp.bench.op import goal_table
from hypermlp.commands.bench import maintainer_tool
from hypermlp.errors import UserError
from hypermlp.ops import native

goals = maintainer_tool("goals")
MEMORY, Goal, Pair = goals.MEMORY, goals.Goal, goals.Pair


@pytest.mark.thorough
def test_every_goal_is_measured(monkeypatch):
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    small = (
        Goal("layer forward", 1, 8, 32, 1e9, 1e9),
        Goal("layer forward", 1, 8, 32, 0.0, 0.0, MEMORY),
        Goal("core forward+backward", 1, 8, 32, 0.0, 0.0),
    )
    pairs = (
        Pair("threads", partial(goals.on_threads, 16, 32), 1e9, 0.0),
        Pair("decoding", partial(goals.decoding, 1, 8, 32), 0.0, 0.0),
    )
    monkeypatch.setattr(goals, "GOALS", small)
    monkeypatch.setattr(goals, "PAIRS", pairs)
    monkeypatch.setattr(goals, "PROCESSES", 1)
    seen, threads = [], torch.get_num_threads()
    try:
        rows = goals.measure(rounds=3, seconds=1, report=seen.append)
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 4  # both goals of the layer share their measurement
    assert len(rows) == len(small) + len(pairs)
    assert rows[1]["ratio_quartiles"] is None
    for row in (rows[0], *rows[2:]):
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
    lines = goal_table(rows).markdown().splitlines()[2:]
    assert [line.rsplit("| ", 1)[1] for line in lines] == ["yes |", "no |", "no |", "yes |", "no |"]


def test_a_wheel_has_no_tools(monkeypatch, tmp_path):
    monkeypatch.setattr(hypermlp, "__file__", str(tmp_path / "hypermlp" / "__init__.py"))
    with pytest.raises(UserError, match="need a git checkout"):
        maintainer_tool("goals")


def test_goals_name_their_cases():
    known = [*goals.GOALS, *goals.PAIRS]
    assert len({goal.text for goal in known}) == len(known)
    assert all(goal.aim < goal.at_most for goal in known)
