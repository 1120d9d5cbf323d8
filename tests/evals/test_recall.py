"""Recall by length: the tasks by their definition, and a short run of the command."""

import json

import numpy as np
import pytest
import torch

from hypermlp import mad
from hypermlp.cli import main
from hypermlp.evals import recall


@pytest.mark.parametrize("test", [False, True])
def test_a_needle_can_be_answered_from_the_text(test):
    inputs, targets = recall.needle(20, 64, np.random.default_rng(0), test)
    again = recall.needle(20, 64, np.random.default_rng(0), test)
    assert all(torch.equal(a, b) for a, b in zip((inputs, targets), again, strict=True))
    assert inputs.shape == targets.shape == (20, 64)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        marks = [place for place, token in enumerate(row) if token == ord("§")]
        assert len(marks) == (2 if test else 5)
        assert marks[-1] == 63
        letter = row[marks[0] + 1]
        assert all(row[place + 1] == letter for place in marks[:-1])
        asked = [place for place, target in enumerate(wanted) if target != mad.IGNORED]
        assert asked == marks[1:]
        assert {wanted[place] for place in asked} == {letter}


def test_recall_is_mads_own():
    inputs, targets = recall.mad_recall(4, 32, np.random.default_rng(0), True)
    assert inputs.shape == targets.shape == (4, 31)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        values = dict(zip(row[:-1:2], row[1::2], strict=True))
        assert wanted[-1] == values[row[-1]]


@pytest.mark.thorough
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "QUESTIONS", 8)
    record = tmp_path / "recall.json"
    names = ["HyperGLU@zero", "HyperGLU@recomputed", "S-p@ntk"]
    assert main(["eval", *names, "--suite", "recall-length", "--limit", "1", "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["results"]
    tasks = [task.title for task in recall.TASKS.values()]
    assert [(row["task"], row["name"]) for row in rows] == [(task, name) for task in tasks for name in names]
    assert all(set(row["accuracy"]) == {"1", "2", "4", "8"} for row in rows)
    assert all(0 <= share <= 1 for row in rows for share in row["accuracy"].values())
    assert "| needle in source code | S-p@ntk | 1 |" in capsys.readouterr().out
    assert main(["report", str(record), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["eval", "nonsense", "--suite", "recall-length"]) == 2
    assert "unknown mixer 'nonsense'" in capsys.readouterr().err
