"""Records are complete or absent, and checked when read."""

import json
import math
import re
import subprocess

import pytest

from hypermlp.reporting import records
from hypermlp.reporting.records import new_record, read_record, write_record


def test_round_trip(tmp_path):
    record = new_record("bench-op", {"batch": 2}, [1, 2])
    write_record(tmp_path / "deep" / "a.json", record)
    assert read_record(tmp_path / "deep" / "a.json", "bench-op") == record
    assert record["machine"]["torch"]


def test_a_record_of_a_checkout_names_its_commit(monkeypatch, tmp_path):
    checkout = tmp_path / "checkout"
    package = checkout / "hypermlp" / "reporting" / "records.py"
    monkeypatch.setattr(records, "__file__", str(package))
    records.commit.cache_clear()
    assert new_record("k", {}, 1)["commit"] is None  # no checkout: installed from a wheel
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(checkout)]
    write_record(package, {})
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    records.commit.cache_clear()
    assert re.fullmatch("[0-9a-f]{12}", new_record("k", {}, 1)["commit"])
    package.write_text("changed")
    records.commit.cache_clear()
    assert new_record("k", {}, 1)["commit"].endswith("-dirty")
    records.commit.cache_clear()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_record(path, new_record("k", {}, 1))
    with pytest.raises(TypeError):
        write_record(path, new_record("k", {}, object()))
    assert read_record(path)["results"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"format": 99})])
def test_something_else_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="not a record"):
        read_record(tmp_path / "a.json")


def test_the_wrong_kind_is_refused(tmp_path):
    write_record(tmp_path / "a.json", new_record("mad", {}, math.pi))
    with pytest.raises(ValueError, match="kind 'mad'; expected 'study'"):
        read_record(tmp_path / "a.json", "study")
