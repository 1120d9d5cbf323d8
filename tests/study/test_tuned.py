"""Studies with several learning rates: tuning seeds choose the rate, other seeds are reported."""

import json
import os

import pytest

from hypermlp.cli import main
from hypermlp.study import lm
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.report import compare, markdown, page
from hypermlp.study.summary import read_study, summary
from hypermlp.study.tables import study_table
from hypermlp.study.tuning import considered

MINI = SIZES["mini"]
TUNING = {  # row -> learning rate -> loss of seed 1
    "S-p": {4e-3: 1.6, 8e-3: 1.4, 1.6e-2: None},
    "R-p": {4e-3: 1.7, 8e-3: 1.8, 1.6e-2: 1.9},
    "gla": {4e-3: None, 8e-3: None, 1.6e-2: 2.0},
}


@pytest.fixture
def tuned(tmp_path, write_lm):
    """Three rows, reported with seeds 2 and 3 at their best rates; S-p also has a seed at another rate."""
    for row, losses in TUNING.items():
        for rate, loss in losses.items():
            write_lm(tmp_path, lm_cell(MINI, row, 1, rate), loss)
    for row, rate, losses in (
        ("S-p", 8e-3, [1.5, 1.52]),
        ("R-p", 4e-3, [1.6, 1.64]),
        ("gla", 1.6e-2, [2.1, 2.2]),
    ):
        for seed, loss in zip((2, 3), losses, strict=True):
            write_lm(tmp_path, lm_cell(MINI, row, seed, rate), loss)
    write_lm(tmp_path, lm_cell(MINI, "S-p", 4, 4e-3), 9.0)
    return tmp_path


def test_rows_report_other_seeds_at_their_best_rate(tuned):
    rows = read_study(tuned).rows
    assert {label: row.rate for label, row in rows.items()} == {"S-p": 8e-3, "R-p": 4e-3, "gla": 1.6e-2}
    assert rows["S-p"].losses == {2: 1.5, 3: 1.52}
    assert rows["R-p"].losses == {2: 1.6, 3: 1.64}
    assert rows["gla"].losses == {2: 2.1, 3: 2.2}


def test_a_row_that_is_not_tuned_is_left_out_of_a_tuned_study(tuned, write_lm):
    for seed in (1, 2):
        write_lm(tuned, lm_cell(MINI, "R-c", seed, 4e-3), 1.9)
    write_lm(tuned, lm_cell(MINI, "R-c-q", 1, 4e-3), 1.9)
    write_lm(tuned, lm_cell(MINI, "R-c-q", 1, 8e-3), 1.9)
    assert read_study(tuned).left_out == {
        "R-c": "no learning rate has been chosen yet",
        "R-c-q": "not trained at learning rate 0.016 yet",
    }


def test_a_reported_seed_at_another_rate_is_no_tuning_seed(tuned, write_lm):
    """Seed 2 was trained at one rate for all rows before rates were tuned."""
    write_lm(tuned, lm_cell(MINI, "S-p", 2, 1.6e-2), 1.0)
    row = read_study(tuned).rows["S-p"]
    assert (row.rate, row.losses) == (8e-3, {2: 1.5, 3: 1.52})


def test_a_rate_that_the_size_does_not_try_is_shown_but_never_chosen(tuned, write_lm):
    """``study run`` would not choose it either. Where grids are widened, it counts only next to the edge."""
    write_lm(tuned, lm_cell(MINI, "R-p", 1, 2e-3), 1.0)
    study = read_study(tuned)
    assert (study.rows["R-p"].rate, study.rows["R-p"].losses) == (4e-3, {2: 1.6, 3: 1.64})
    assert "| R-p | 1.000 | **1.700** | 1.800 | 1.900 |" in markdown(study)
    losses = dict(zip((1e-3, 2e-3, *SIZES["headline"].rates), (1.0, 1.4, 1.5, 1.6, 1.7, 1.8), strict=True))
    assert considered(SIZES["headline"], "S-p", losses) == losses
    assert considered(SIZES["headline"], "S-p", losses | {4e-3: 1.65}) == {
        rate: (losses | {4e-3: 1.65})[rate] for rate in SIZES["headline"].rates
    }


def test_the_learning_rate_is_shown_only_where_it_was_tuned(tuned, made_up):
    study, plain = read_study(tuned), read_study(made_up)
    assert study_table(study).columns[1] == "learning rate"
    assert "| S-p | 0.008 | 1,000,000 | 2.00 | 2 | 1.510 (3.067) | 240 (5,500) | 360 (10,000) | " in markdown(
        study
    )
    assert summary(study)["rows"]["gla"]["learning_rate"] == 1.6e-2
    assert "its own learning rate" in page(study, "tuned")
    assert not plain.tuned
    assert all(row.rate is None for row in plain.rows.values())
    assert "learning rate" not in study_table(plain).columns
    assert "learning_rate" not in summary(plain)["rows"]["S-p"]
    assert "its own learning rate" not in page(plain, "plain")


def test_the_rate_is_no_shared_setting_of_a_tuned_study(tuned, made_up):
    shared, plain = read_study(tuned).settings["training"], read_study(made_up).settings["training"]
    assert plain.keys() - shared.keys() == {"learning_rate", "min_learning_rate"}
    assert compare(read_study(tuned), read_study(tuned)).same


def test_a_reported_seed_that_diverged_has_no_loss_and_is_counted(tuned, write_lm):
    write_lm(tuned, lm_cell(MINI, "R-p", 3, 4e-3), None)
    study = read_study(tuned)
    assert study.rows["R-p"].losses == {2: 1.6}
    assert "| 1 (1 diverged) | 1.600 (3.079) | " in markdown(study)
    write_lm(tuned, lm_cell(MINI, "R-p", 2, 4e-3), None)
    study = read_study(tuned)
    assert "R-p" not in study.rows
    assert "- No loss for R-p: all reported seeds diverged." in markdown(study)
    assert "all reported seeds diverged" in page(study, "diverged")
    assert json.loads(json.dumps(summary(study), allow_nan=False))["left_out"] == study.left_out


def test_a_row_that_is_only_tuned_is_left_out(tuned, write_lm):
    for rate in MINI.rates:
        write_lm(tuned, lm_cell(MINI, "S-c", 1, rate), 1.9)
    assert read_study(tuned).left_out == {"S-c": "only the tuning seed has been run"}


def test_a_folder_with_tuning_seeds_alone_shows_their_losses(tmp_path, write_lm, capsys):
    for rate, loss in zip(MINI.rates, (1.5, 1.4, None), strict=True):
        write_lm(tmp_path, lm_cell(MINI, "S-p", 1, rate), loss)
    assert main(["study", "report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| label | at 0.004 | at 0.008 | at 0.016 |" in out
    assert "| S-p | 1.500 | 1.400 | diverged |" in out
    assert "- No loss for S-p: only the tuning seed has been run." in out


def test_diverged_trainings_alone_have_nothing_to_report(tmp_path, write_lm, capsys):
    write_lm(tmp_path, lm_cell(MINI, "S-p", 2, 8e-3), None)
    assert main(["study", "report", str(tmp_path)]) == 2
    assert "all trainings diverged" in capsys.readouterr().err


def test_rows_with_different_rates_that_were_not_tuned_are_two_studies(tmp_path, write_lm):
    write_lm(tmp_path, lm_cell(MINI, "S-p", 2, 4e-3), 1.5)
    write_lm(tmp_path, lm_cell(MINI, "R-p", 2, 8e-3), 1.5)
    with pytest.raises(
        ValueError, match="more than one study: training.learning_rate is 0.008 for R-p, 0.004"
    ):
        read_study(tmp_path)


def test_a_reported_model_that_diverged_is_shown_as_such(tmp_path, write_lm, capsys):
    """``study run`` finds all cells recorded, one of them without a loss; ``report`` shows the same table."""
    for row, loss in (("S-p", None), ("S-pc", 2.5)):
        write_lm(tmp_path, lm_cell(SIZES["smoke"], row, 1), loss)
    command = ["study", "run", "--size", "smoke", "--labels", "S-p", "S-pc", "--columns", "lm"]
    assert main([*command, "--out", str(tmp_path)]) == 0
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
