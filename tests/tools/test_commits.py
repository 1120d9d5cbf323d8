"""Two commits side by side, and the check that the machine is idle."""

import subprocess
import sys

import pytest

from hypermlp.bench.idle import busy_processes
from hypermlp.bench.measure import quartiles
from hypermlp.bench.op import commit_table
from hypermlp.commands.bench import maintainer_tool
from hypermlp.errors import UserError

commits = maintainer_tool("commits")
median_interval = commits.median_interval
SMALL = {"label": "G-cg-q-12o", "batch": 1, "length": 16, "hidden": 32, "threads": 1, "rounds": 5}


@pytest.fixture
def checkout():
    if commits._git("rev-parse", "--verify", "HEAD").returncode != 0:
        pytest.skip("the tests do not run in a git checkout")


@pytest.mark.thorough
def test_this_tree_against_a_commit(checkout):
    with commits.worktree("HEAD") as tree:
        rows = commits.compare(tree, SMALL, seconds=20)
    assert not tree.exists()
    assert [row["what"] for row in rows] == [
        "layer forward",
        "layer forward+backward",
        "layer decode 20 tokens",
        "layer decode 20 tokens, bfloat16",
    ]
    for row in rows:
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["ratios"] == SMALL["rounds"]
        assert row["ratio_interval"][0] <= row["ratio"] <= row["ratio_interval"][1]
    assert "quartiles" in commit_table(rows).markdown()


def test_the_interval_of_a_median():
    """The ranks of the table of the sign test: 2 and 9 of 10 values, 10 and 21 of 30."""
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 31)) == (10, 21)
    assert median_interval([3.0, 1.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)


def test_an_unknown_commit_is_refused(checkout):
    with (
        pytest.raises(UserError, match="'no-such-commit': it names no commit"),
        commits.worktree("no-such-commit"),
    ):
        raise AssertionError("checked out")


def test_the_worker_must_use_the_tree_it_was_given(tmp_path):
    """An empty tree has no package, so that an installed one would be found, or none."""
    with commits.Worker(tmp_path) as worker, pytest.raises(UserError, match="cannot be imported|ended"):
        worker.setup(SMALL)


def test_other_processes_are_found_and_our_own_are_not():
    spin = [sys.executable, "-c", "while True: pass"]
    child = subprocess.Popen(spin)
    # The second process belongs to a session of its own, and its parent ends: it is not ours any more.
    code = (
        f"import subprocess as s; print(s.Popen({spin!r}, stdout=s.DEVNULL, stderr=s.DEVNULL, "
        "start_new_session=True).pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    orphan = int(done.stdout)
    try:
        busy = busy_processes(seconds=1.0, limit=0.01)
    finally:
        child.kill()
        child.wait()
        subprocess.run(["kill", str(orphan)], check=True)
    assert any(name.endswith(f"({orphan})") for name in busy)
    assert not any(name.endswith(f"({child.pid})") for name in busy)


def test_quartiles():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0)
