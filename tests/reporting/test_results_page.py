"""The results page shows runs and records as they were written."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from hypermlp.cli import main
from hypermlp.commands.report import KINDS
from hypermlp.mad import protocol
from hypermlp.mad.protocol import changed
from hypermlp.reporting.records import new_record, write_record
from hypermlp.reporting.sources import gather

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def runs(tmp_path):
    """Two runs that are still being written, and a record of an evaluation."""
    for name, mixer, scale in (("ours", "G-cg-q-12o", 1.0), ("theirs", "softmax", 1.2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps({"model": {"mixer": mixer}}))
        lines = [{"step": 0, "parameters": 1234}]
        lines += [{"step": step, "tokens": 10 * step, "loss": scale * 100 / step} for step in (10, 20, 30)]
        lines += [{"step": step, "eval_validation_loss": scale * 110 / step} for step in (10, 30)]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "lo'
        )
    score = {"value": 0.75, "error": 0.01, "higher_is_better": True}
    row = {"checkpoint": "runs/<ours>", "parameters": 1234, "scores": {"recall": score}}
    write_record(tmp_path / "eval.json", new_record("eval", {}, [row]))
    return tmp_path


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_the_page_in_a_browser(runs, browser, size):
    places = [
        runs / "runs",
        runs / "eval.json",
        RESULTS / "bench-mixers.json",
        RESULTS / "bench-op.json",
        RESULTS / "study-mini" / "mad",
    ]
    options = ["--out", str(runs / "report.html"), "--title", "All <of> it"]
    assert main(["report", *map(str, places), *options]) == 0
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
    found = (ours.name, ours.mixer, ours.parameters, ours.steps, ours.tokens)
    assert found == ("ours", "G-cg-q-12o", 1234, 30, 300)
    assert theirs.validation == [(10, pytest.approx(13.2)), (30, pytest.approx(4.4))]


def test_every_kind_of_record_in_the_project_is_shown(tmp_path, capsys):
    assert main(["report", str(RESULTS), "--out", str(tmp_path / "all.html")]) == 0
    assert "left out" not in capsys.readouterr().err


def mad_record(**changes):
    (cell,) = protocol.cells("S-p", protocol.GRIDS["mini"], ["in-context-recall"])
    return dataclasses.asdict(changed(cell, **changes))


def test_scores_of_other_settings_are_not_averaged(tmp_path, capsys):
    for name, score, changes in (
        ("mini", 0.25, {}),
        ("longer", 0.75, {"num_train": 999}),
        ("smaller", 0.5, {"width": 64}),
    ):
        record = new_record("mad", mad_record(**changes), {"score": score})
        write_record(tmp_path / "mad" / "in-context-recall" / f"{name}.json", record)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert all(f'<td class="number">{score} (93.4)</td>' in text for score in ("25.0", "75.0", "50.0"))
    assert "mini grid" in text
    assert "num_train 999" in text


def test_runs_of_one_name_are_told_apart_and_no_run_is_shown_twice(runs):
    shutil.copytree(runs / "runs", runs / "others")
    names = [run.name for run in gather([str(runs / "runs"), str(runs / "others"), str(runs / "runs")]).runs]
    assert len(names) == len(set(names)) == 4


def test_a_run_that_diverged_is_shown_as_far_as_it_went(runs):
    with open(runs / "runs" / "ours" / "metrics.jsonl", "a") as file:
        file.write('ss": 0}\n{"step": 50, "loss": NaN}\n')
    assert main(["report", str(runs / "runs"), "--out", str(runs / "page.html")]) == 0
    assert '<td class="number">diverged</td>' in (runs / "page.html").read_text()


DAMAGED = {
    "eval": [{"checkpoint": "x"}],
    "mad": {},
    "study-lm": {"loss": 1.0},
    "bench-op": [{"what": 1}],
    "bench-mixers": [{"mixer": "gla"}],
    "bench-table": None,
    "something else": [],
}


def test_what_is_damaged_is_left_out_and_named(runs, capsys):
    """The page still shows everything else."""
    for kind, results in DAMAGED.items():
        write_record(runs / "records" / f"{kind}.json", new_record(kind, {}, results))
    good = new_record("bench-mixers", {}, []) | {"machine": "a word"}
    write_record(runs / "records" / "machine.json", good)
    (runs / "records" / "half.json").write_text('{"format": 1,')
    (runs / "records" / "deep.json").write_text("[" * 100_000)
    (runs / "records" / "run").mkdir()
    (runs / "records" / "run" / "metrics.jsonl").write_text("[1]\n")
    assert main(["report", str(runs), "--out", str(runs / "page.html")]) == 0
    said = capsys.readouterr().err
    page = (runs / "page.html").read_text()
    others = ["machine.json", "half.json", "deep.json", "metrics.jsonl"]
    for name in [*(f"{kind}.json" for kind in DAMAGED), *others]:
        assert name in said
        assert name in page
    assert "0.750 ± 0.010" in page
    assert main(["report", str(runs / "records"), "--out", str(runs / "page.html")]) == 2
    assert "nothing to show" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 0, "parameters": null}',
        b'{"step": 1, "loss": 1e308}',
        b'{"step": 1' + b"0" * 308 + b', "loss": 1.0}',
        b'{"step": 1, "loss": "low"}',
        b"\xff\xfe",
    ],
    ids=lambda line: line[:24].decode("latin1"),
)
def test_a_run_with_impossible_numbers_is_left_out_and_named(runs, capsys, line):
    metrics = runs / "runs" / "theirs" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b"\n" + line + b"\n")
    assert main(["report", str(runs / "runs"), "--out", str(runs / "page.html")]) == 0
    assert "theirs/metrics.jsonl" in capsys.readouterr().err
    page = (runs / "page.html").read_text()
    assert "ours" in page
    assert "3.3333" in page


def test_nonsense_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "has no run and no record" in capsys.readouterr().err
    shutil.copy(__file__, tmp_path / "x.json")
    assert main(["report", str(tmp_path / "x.json")]) == 2
    assert "x.json is not a record" in capsys.readouterr().err
