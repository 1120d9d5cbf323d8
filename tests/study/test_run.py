"""Every row builds and steps; a study that is killed and restarted gives the same results."""

import os
import random
import signal
import subprocess
import sys

import pytest

from hypermlp.cli import main
from hypermlp.jobs.cells import recorded
from hypermlp.study.claims import CLAIMED
from hypermlp.study.protocol import ROWS, SIZES, lm_cells, tuning_cells

pytestmark = [pytest.mark.usefixtures("server"), pytest.mark.thorough]
SMOKE = ["study", "run", "--size", "smoke", "--columns", "lm", "--out"]  # and the folder
RESULTS = {"loss", "train_loss", "validation_loss", "curves", "parameters", "data_digest"}


def test_there_are_33_rows_and_two_other_readings():
    assert len(ROWS) == len(set(ROWS)) == 35


def test_sizes_cover_every_row_and_the_claims_with_more_seeds():
    mini = list(lm_cells(SIZES["mini"], ROWS, CLAIMED))
    assert {cell.mixer for cell in mini} == set(ROWS)
    for row in CLAIMED:
        assert len({cell.seed for cell in mini if cell.mixer == row}) >= 2
    full = next(lm_cells(SIZES["full"], ["R"], CLAIMED))
    assert full.recipe["training"]["steps"] == 40_000


def test_rows_differ_in_nothing_but_the_label_and_the_seed():
    def common(cell):
        recipe = {part: dict(cell.recipe[part]) for part in ("model", "data", "training")}
        recipe["model"]["mixer"], recipe["training"]["seed"] = "", 0
        return recipe

    first, *others = lm_cells(SIZES["mini"], ROWS, CLAIMED)
    assert all(common(cell) == common(first) for cell in others)


def test_every_row_builds_and_steps(tmp_path, capsys):
    assert main([*SMOKE, str(tmp_path), "--jobs", "2", "--threads", "1"]) == 0
    for cell in lm_cells(SIZES["smoke"], ROWS, CLAIMED):
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
    for cell in lm_cells(SIZES["smoke"], labels, set()):
        whole, killed = recorded(tmp_path / "whole", cell), recorded(tmp_path / "killed", cell)
        assert {key: whole[key] for key in RESULTS} == {key: killed[key] for key in RESULTS}


def test_learning_rates_are_tuned_on_other_rows():
    tuned = list(tuning_cells(SIZES["mini"]))
    assert not {cell.mixer for cell in tuned} & CLAIMED
    assert len({cell.recipe["training"]["learning_rate"] for cell in tuned}) > 2


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
