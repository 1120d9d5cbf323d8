"""Any runs and records on one page, as they say."""

import json
import shutil
from pathlib import Path

import pytest

from hypermlp.cli import main
from hypermlp.records import new_record, write_record
from hypermlp.report.page import KINDS, cells
from hypermlp.report.sources import gather

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def runs(tmp_path):
    """Two runs, one of which is being written, and a record of evaluations."""
    for name, mixer, scale in (("ours", "G-cg-q-12o", 1.0), ("theirs", "softmax", 1.2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps({"model": {"mixer": mixer}}))
        lines = [{"step": 0, "parameters": 1234}]
        lines += [{"step": step, "tokens": 10 * step, "loss": scale * 100 / step} for step in (10, 20, 30)]
        lines += [{"step": step, "eval_validation_loss": scale * 110 / step} for step in (10, 30)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "lo')
    score = {"value": 0.75, "error": 0.01, "higher_is_better": True}
    row = {"checkpoint": "runs/<ours>", "parameters": 1234, "scores": {"recall": score}}
    write_record(tmp_path / "eval.json", new_record("eval", {}, [row]))
    return tmp_path


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_the_page_in_a_browser(runs, browser, size):
    places = [runs / "runs", runs / "eval.json", RESULTS / "bench-mixers.json", RESULTS / "bench-op.json", RESULTS / "study-mini" / "mad"]
    assert main(["report", *map(str, places), "--out", str(runs / "report.html"), "--title", "All <of> it"]) == 0
    view = browser(runs / "report.html", size)
    assert view.locator("h1").inner_text() == "All <of> it"
    assert view.locator("svg .series").count() == 4
    heads = view.locator("h2").all_inner_texts()
    assert heads == ["Training", *(KINDS[kind].title for kind in ("eval", "mad", "bench-op", "bench-mixers"))]
    text = view.locator("main").inner_text()
    for said in ("<ours>", "0.750 ± 0.010", "3.3333", "3.6667", "gated-deltanet"):
        assert said in text
    view.locator("svg .series").nth(1).focus()
    assert view.locator("#tip").inner_text() == "theirs\nsoftmax\n4.0000 after 30 steps"


def test_runs_are_read_as_far_as_they_are_written(runs):
    ours, theirs = gather([str(runs / "runs")]).runs
    assert (ours.name, ours.mixer, ours.parameters, ours.steps, ours.tokens) == ("ours", "G-cg-q-12o", 1234, 30, 300)
    assert theirs.validation == [(10, pytest.approx(13.2)), (30, pytest.approx(4.4))]


def test_every_kind_of_record_in_the_project_is_shown(tmp_path, capsys):
    assert main(["report", str(RESULTS), "--out", str(tmp_path / "all.html")]) == 0
    assert "not shown" not in capsys.readouterr().out


def test_tables_are_those_that_the_commands_print():
    assert cells("| a | b |\n| --- | ---: |\n| x | **1** |") == [["a", "b"], ["x", "1"]]


def test_nonsense_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "has no run and no record" in capsys.readouterr().err
    shutil.copy(__file__, tmp_path / "x.json")
    assert main(["report", str(tmp_path)]) == 2
    assert "x.json is damaged" in capsys.readouterr().err
