"""Every row builds and steps; a study that is killed and restarted gives the same results."""

import dataclasses
import os
import random
import signal
import subprocess
import sys

import pytest

from hypermlp.cli import main
from hypermlp.jobs.cells import record_path, recorded
from hypermlp.study import lm, protocol
from hypermlp.study.protocol import ROWS, SIZES, lm_cell, lm_cells
from hypermlp.study.tuning import best_rate

SMOKE = ["study", "run", "--size", "smoke", "--columns", "lm", "--out"]  # and the folder
RESULTS = {"loss", "train_loss", "validation_loss", "curves", "parameters", "data_digest"}


@pytest.fixture
def run_smoke(tmp_path, monkeypatch):
    """``run_smoke(labels, *changes, **size_changes)`` runs rows of a changed size smoke, and returns it."""

    def run(labels, *changes, **size_changes):
        smoke = SIZES["smoke"]
        size = dataclasses.replace(smoke, changes=(*smoke.changes, *changes), seeds=(2,), **size_changes)
        monkeypatch.setitem(protocol.SIZES, "smoke", size)
        assert main([*SMOKE, str(tmp_path), "--threads", "1", "--labels", *labels]) == 0
        return size

    return run


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_every_row_builds_and_steps(tmp_path, capsys):
    assert main([*SMOKE, str(tmp_path), "--jobs", "2", "--threads", "1"]) == 0
    for cell in lm_cells(SIZES["smoke"], ROWS):
        result = recorded(tmp_path, cell)
        assert 4 < result["loss"] < 7, cell.title
        assert result["parameters"] > 15_000
        assert [step for step, _ in result["curves"]["validation"]] == [1, 2]
    assert not (tmp_path / "running").exists()
    capsys.readouterr()
    assert main([*SMOKE, str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "35 of 35 cells are recorded" in said.err
    assert all(f"| {row} |" in said.out for row in ROWS)


@pytest.mark.usefixtures("server")
@pytest.mark.slow
def test_a_study_that_is_killed_and_restarted_gives_the_same_results(tmp_path):
    labels = ["S-p", "G-cg-q-12o", "R-12o!"]
    options = ["--threads", "1", "--labels", *labels]
    assert main([*SMOKE, str(tmp_path / "whole"), *options]) == 0
    command = [sys.executable, "-m", "hypermlp", *SMOKE, str(tmp_path / "killed"), "--jobs", "2", *options]
    for seconds in (random.Random(0).uniform(3, 9) for _ in range(2)):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    for cell in lm_cells(SIZES["smoke"], labels):
        whole, killed = recorded(tmp_path / "whole", cell), recorded(tmp_path / "killed", cell)
        assert {key: whole[key] for key in RESULTS} == {key: killed[key] for key in RESULTS}


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_study_run_tunes_then_trains_and_evaluates(tmp_path, run_smoke, capsys):
    changes = ("data.context=256", "training.batch_tokens=1024")
    size = run_smoke(["S-p"], *changes, rates=(1e-3, 1e-1), evaluate=True)
    chosen = best_rate(
        {rate: recorded(tmp_path, lm_cell(size, "S-p", 1, rate))["loss"] for rate in size.rates}
    )
    assert f"learning rates: S-p {chosen:g}" in capsys.readouterr().err
    cell = lm_cell(size, "S-p", 2, chosen)
    assert recorded(tmp_path, cell)["local"]["bits per byte"]["value"] > 1
    kept = [path.name for path in (tmp_path / "models" / "lm").iterdir()]
    assert kept == [record_path(tmp_path, cell).stem]


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_rows_of_mixing_train(tmp_path, run_smoke):
    rows = ("G-g-q-12o+canon", "S-p+canon", "fox")
    size = run_smoke(rows, rows=rows, rates=(1e-3, 2e-3))
    for row in rows:
        results = [recorded(tmp_path, lm_cell(size, row, 2, rate)) for rate in size.rates]
        assert sum(result is not None for result in results) == 1
    assert main(["study", "report", str(tmp_path)]) == 0


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_a_training_that_diverges_is_recorded_as_such(tmp_path, run_smoke):
    size = run_smoke(["S-p"], "training.steps=6", "training.explosion=1.5", rates=(1e-3, 1e9))
    assert recorded(tmp_path, lm_cell(size, "S-p", 1, 1e9))["loss"] is None
    assert recorded(tmp_path, lm_cell(size, "S-p", 2, 1e-3))["loss"] > 0


def test_a_reported_model_that_diverged_is_shown_as_such(tmp_path, write_lm, capsys):
    """``study run`` finds all cells recorded, one of them without a loss; ``report`` shows the same table."""
    for row, loss in (("S-p", None), ("S-pc", 2.5)):
        write_lm(tmp_path, lm_cell(SIZES["smoke"], row, 1), loss)
    assert main([*SMOKE, str(tmp_path), "--labels", "S-p", "S-pc"]) == 0
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    printed, page = capsys.readouterr(), (tmp_path / "page.html").read_text()
    assert "| S-p | 1 | diverged |" in printed.out
    assert '<td class="number">diverged</td>' in page
    assert "2.5000" in page
    assert "damaged" not in page + printed.err


@pytest.mark.parametrize(
    ("device", "visible", "left", "used"),
    [
        ("cpu", "0,1", "", "cpu"),
        ("cuda", None, "0", "cuda"),
        ("cuda:1", None, "1", "cuda"),
        ("cuda:1", "GPU-a,GPU-b", "GPU-b", "cuda"),
        ("cuda", "2,3", "2", "cuda"),
        ("mps", None, None, "mps"),
    ],
)
def test_a_cell_sees_no_gpu_but_its_own(tmp_path, monkeypatch, device, visible, left, used):
    """Trainer would use the first GPU whatever the device, and all of them where several are visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    seen = []

    def train(recipe, run, **options):
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return tmp_path / "final"

    monkeypatch.setattr(lm, "train", train)
    monkeypatch.setattr(lm, "read_run", lambda *_: {})
    monkeypatch.setattr(lm, "_scores", lambda model, device: seen.append(device))
    (tmp_path / "final").mkdir()
    lm.work(lm_cell(SIZES["smoke"], "S-p", 1), device, print, folder=tmp_path, evaluate=True)
    assert seen == [left, used]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "tiny"], "unknown size 'tiny'; allowed: smoke, mini, headline, full, mixing"),
        (["--labels", "Q"], "unknown mixer 'Q'"),
        (["--jobs", "0"], "--jobs is 0"),
    ],
)
def test_errors_before_training(tmp_path, capsys, arguments, message):
    assert main(["study", "run", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
