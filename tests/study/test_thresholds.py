"""Steps to a loss, by hand; and the columns of the paper's Table 1."""

import dataclasses

import pytest

from hypermlp.jobs.cells import record_path
from hypermlp.mad.protocol import GRIDS, cells
from hypermlp.reporting.records import new_record, write_record
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.reading import read_study
from hypermlp.study.report import summary
from hypermlp.study.tables import study_table
from hypermlp.study.thresholds import mean_curve, steps_to, thresholds

CURVE = [(50, 3.0), (100, 2.0), (150, 2.2), (200, 1.0)]


def test_thresholds_are_losses_at_fractions_of_the_steps():
    assert thresholds(CURVE) == pytest.approx((2.4, 2.08, 1.96, 1.0))  # at steps 80, 120, 160 and 200


def test_steps_are_interpolated_between_evaluations():
    assert [steps_to(CURVE, loss) for loss in (2.5, 2.0, 1.6, 1.0)] == pytest.approx([75, 100, 175, 200])


def test_a_loss_that_is_not_reached_or_reached_before_the_first_evaluation():
    assert steps_to(CURVE, 0.9) is None
    assert steps_to(CURVE, 3.5) == 50


def test_the_mean_of_seeds():
    assert mean_curve([[[1, 2.0], [2, 1.0]], [[1, 4.0], [2, 1.5]]]) == [(1, 3.0), (2, 1.25)]
    with pytest.raises(ValueError, match="different steps"):
        mean_curve([[[1, 2.0]], [[2, 2.0]]])


def test_the_columns_of_table_1(made_up):
    study = read_study(made_up)
    table = study_table(study)
    columns = {title.split(" (")[0]: index for index, title in enumerate(table.columns)}
    steps = [index for title, index in columns.items() if title.startswith("steps to")]
    lines = {line[0]: line for line in table.rows}
    assert len(lines) == 35
    assert len(steps) == 4
    assert lines["S-p"][steps[0]] == "240 (5,500)"  # 40 % of 600 steps
    assert [lines["R-12!"][index] for index in steps] == ["not reached (not reached)"] * 4
    assert lines["R-12o!"][columns["compress"]] == "50.0 (49.4)"
    assert lines["R-12o!"][columns["copy"]] == "missing (98.3)"
    assert lines["R"][columns["MAD average"]] == "missing (44.3)"
    found = summary(study)
    assert len(found["thresholds"]) == 4
    assert found["rows"]["R-12!"]["steps_to_thresholds"] == [None] * 4


def test_rows_that_were_not_run_are_shown_as_missing(tmp_path, write_lm):
    write_lm(tmp_path, lm_cell(SIZES["full"], "R-p", 1337), 1.5)
    table = study_table(read_study(tmp_path))
    lines = {line[0]: line for line in table.rows}
    assert len(lines) == 35
    assert lines["S-p"][-1] == "missing (72.4)"
    assert "steps to S-p's loss at 40% (3.3)" in table.columns
    assert lines["R-p"][5] == "missing (6,500)"  # without S-p there is no threshold
    assert all("" not in line for line in table.rows)


def test_a_task_with_some_of_its_cells_has_no_score(tmp_path, write_lm):
    write_lm(tmp_path, lm_cell(SIZES["mini"], "R-p", 1, 8e-3), 1.5)
    both = list(cells("R-p", GRIDS["mini"], ["noisy-in-context-recall"]))
    assert len(both) == 2
    for count, cell in enumerate(both):
        path = record_path(tmp_path / "mad", cell)
        write_record(path, new_record(cell.kind, dataclasses.asdict(cell), {"score": 0.25}))
        assert len(read_study(tmp_path).mad.scores.get("R-p", {})) == count
