"""Which cells of a size are recorded, which learning rate that gives a row, and what is missing."""

import json
import math

import pytest

from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.reading import read_study
from hypermlp.study.report import compare, markdown, missing, page, summary
from hypermlp.study.tables import contrast_table, convolution_table, difference, study_table
from hypermlp.study.tuning import considered

MINI, HEADLINE, MIXING, FACTORIAL = (SIZES[name] for name in ("mini", "headline", "mixing", "factorial"))
HYPERGLU = "G-cg-q-12o"


@pytest.fixture
def write_row(tmp_path, write_lm):
    """``write_row(size, row, best, losses)`` writes tuning, and seeds 2, 3, ... at the best rate."""

    def write(size, row, best, losses):
        for rate in size.rates_of(row):
            write_lm(tmp_path, lm_cell(size, row, 1, rate), 1.0 + abs(math.log2(rate / best)))
        for seed, loss in enumerate(losses, 2):
            local = {"bits per byte": {"value": (loss or 0) / math.log(2)}, "recall": {"value": 0.15}}
            write_lm(tmp_path, lm_cell(size, row, seed, best), loss, local=local)

    return write


@pytest.fixture
def tuned(tmp_path, write_lm):
    """Three rows of mini, reported with seeds 2 and 3 at their best rates; one of them is no row of it."""
    tuning = {  # row -> learning rate -> loss of seed 1
        "S-p": {4e-3: 1.6, 8e-3: 1.4, 1.6e-2: None},
        "R-p": {4e-3: 1.7, 8e-3: 1.8, 1.6e-2: 1.9},
        "gla": {4e-3: None, 8e-3: None, 1.6e-2: 2.0},
    }
    reported = {"S-p": (8e-3, [1.5, 1.52]), "R-p": (4e-3, [1.6, 1.64]), "gla": (1.6e-2, [2.1, 2.2])}
    for row, losses in tuning.items():
        for rate, loss in losses.items():
            write_lm(tmp_path, lm_cell(MINI, row, 1, rate), loss)
    for row, (rate, losses) in reported.items():
        for seed, loss in zip((2, 3), losses, strict=True):
            write_lm(tmp_path, lm_cell(MINI, row, seed, rate), loss)
    return tmp_path


def test_rows_report_other_seeds_at_their_best_rate(tuned):
    study = read_study(tuned)
    assert study.size == MINI
    found = {label: (row.rate, row.losses) for label, row in study.rows.items()}
    assert found == {
        "S-p": (8e-3, {2: 1.5, 3: 1.52}),
        "R-p": (4e-3, {2: 1.6, 3: 1.64}),
        "gla": (1.6e-2, {2: 2.1, 3: 2.2}),
    }
    assert "| S-p | 0.008 | 1,000,000 | 2.00 | 2 | 1.510 (3.067) | 240 (5,500) | 360 (10,000) | " in markdown(
        study
    )
    assert summary(study)["rows"]["gla"]["learning_rate"] == 1.6e-2
    assert "its own learning rate" in page(study, "tuned")
    assert compare(study, study).same


@pytest.mark.parametrize(
    ("rates", "seeds", "reason"),
    [
        ([4e-3], [], "not trained at learning rate 0.008, 0.016 yet"),
        ([4e-3, 8e-3], [2], "not trained at learning rate 0.016 yet"),
        (MINI.rates, [], "only the tuning seed has been run"),
    ],
)
def test_a_row_that_is_not_complete_has_no_loss(tuned, write_lm, rates, seeds, reason):
    for seed, rate in [*((1, rate) for rate in rates), *((seed, 4e-3) for seed in seeds)]:
        write_lm(tuned, lm_cell(MINI, "R-c", seed, rate), 1.9)
    study = read_study(tuned)
    assert study.left_out == {"R-c": reason}
    assert f"- No loss for R-c: {reason}." in markdown(study)


def test_records_that_the_size_does_not_list_are_named_and_not_used(tuned, write_lm):
    """Another rate than the chosen one, another seed, a row that was not tuned, another recipe."""
    others = [lm_cell(MINI, "S-p", 2, 1.6e-2), lm_cell(MINI, "S-p", 7, 8e-3), lm_cell(MINI, "R-c", 2, 4e-3)]
    others.append(lm_cell(HEADLINE, "S-p", 2, 8e-3))
    before = {path.stem for path in tuned.rglob("*.json")}
    for cell in others:
        write_lm(tuned, cell, 1.0)
    study = read_study(tuned)
    assert study.rows["S-p"].losses == {2: 1.5, 3: 1.52}
    assert set(study.unlisted) == {path.stem for path in tuned.rglob("*.json")} - before
    assert len(study.unlisted) == 4
    for shown in (markdown(study), page(study, "the study")):
        assert f"4 records, because the size has no such cells: {', '.join(study.unlisted)}." in shown


def test_a_rate_that_the_size_does_not_try_is_shown_but_never_chosen(tuned, write_lm):
    """``study run`` would not choose it either. Where grids are widened, it counts only next to the edge."""
    write_lm(tuned, lm_cell(MINI, "R-p", 1, 2e-3), 1.0)
    study = read_study(tuned)
    assert (study.rows["R-p"].rate, study.rows["R-p"].losses) == (4e-3, {2: 1.6, 3: 1.64})
    assert "| R-p | 1.000 | **1.700** | 1.800 | 1.900 |" in markdown(study)
    losses = dict(zip((1e-3, 2e-3, *HEADLINE.rates), (1.0, 1.4, 1.5, 1.6, 1.7, 1.8), strict=True))
    assert considered(HEADLINE, "S-p", losses) == losses
    assert considered(HEADLINE, "S-p", losses | {4e-3: 1.65}) == {
        rate: (losses | {4e-3: 1.65})[rate] for rate in HEADLINE.rates
    }


def test_the_learning_rate_is_shown_only_where_it_is_tuned(tuned, tmp_path, write_lm):
    assert study_table(read_study(tuned)).columns[1] == "learning rate"
    plain = tmp_path / "smoke"
    for row in ("S-p", "R-p"):
        write_lm(plain, lm_cell(SIZES["smoke"], row, 1), 1.5)
    study = read_study(plain)
    assert study.rows["S-p"].rate is None
    assert "learning rate" not in study_table(study).columns
    assert "learning_rate" not in summary(study)["rows"]["S-p"]
    assert "its own learning rate" not in page(study, "plain")
    tuned_keys = MINI.settings["training"].keys()
    assert SIZES["smoke"].settings["training"].keys() - tuned_keys == {"learning_rate", "min_learning_rate"}


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


def test_a_folder_with_tuning_seeds_alone_shows_their_losses(tmp_path, write_lm, capsys):
    for rate, loss in zip(MINI.rates, (1.5, 1.4, None), strict=True):
        write_lm(tmp_path, lm_cell(MINI, "S-p", 1, rate), loss)
    assert main(["study", "report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| label | at 0.004 | at 0.008 | at 0.016 |" in out
    assert "| S-p | 1.500 | 1.400 | diverged |" in out
    assert "- No loss for S-p: only the tuning seed has been run." in out
    assert main(["study", "figure", str(tmp_path)]) == 2
    assert "no row has a reported seed yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        ("smoke", {}, "no loss to report: all trainings diverged"),
        ("mini", {}, "no loss to report: the size of the study has none of its cells"),
        ("mini", {"steps": 40}, "no records of a size of this version"),
    ],
)
def test_records_without_anything_to_report_are_refused(tmp_path, write_lm, size, change, message):
    cell = lm_cell(SIZES[size], "S-p", SIZES[size].seeds[0])
    cell.recipe["training"].update(change)
    write_lm(tmp_path, cell, None)
    with pytest.raises(UserError, match=message):
        read_study(tmp_path)


def test_differences_are_paired_by_seed_and_what_is_missing_is_said(tmp_path, write_row, write_lm):
    """At headline: three rows, one of them with two of its five seeds; a fourth is tuned only in part."""
    write_row(HEADLINE, HYPERGLU, 1.6e-2, [1.10, 1.12, 1.11, 1.13, 1.09])
    write_row(HEADLINE, "S-p", 8e-3, [1.20, 1.21, 1.22, 1.22, 1.20])
    write_row(HEADLINE, "S-pc", 8e-3, [1.15, 1.17])
    write_lm(tmp_path, lm_cell(HEADLINE, "R-cg-q-12o", 1, 4e-3), 1.3)
    study = read_study(tmp_path)
    differences = [0.10, 0.09, 0.11, 0.09, 0.11]
    mean = sum(differences) / 5
    deviation = math.sqrt(sum((each - mean) ** 2 for each in differences) / 4)
    half = 2.776 * deviation / math.sqrt(5)
    assert difference(study, "S-p") == pytest.approx((mean, mean - half, mean + half))
    assert difference(study, "S-pc", "bits per byte").value == pytest.approx(0.05 / math.log(2))
    table = contrast_table(study)
    lines = {line[0]: line for line in table.rows}
    assert set(lines) == set(HEADLINE.rows)
    assert lines[HYPERGLU][4:6] == ["1.110 (1.090 to 1.130)", "reference"]
    assert lines["S-p"][1] == "0.008"
    assert lines["S-p"][5].startswith("+0.100 (+0.0")
    assert lines["R-cg-q-12o"][1:] == ["missing"] * (len(table.columns) - 1)
    assert missing(study) == [
        "No loss for R-cg-q-12o: not trained at learning rate 0.008, 0.016, 0.032 yet.",
        "S-pc lacks seed 4, 5, 6.",
    ]
    assert study.verdicts == []  # the paper's claims are about other parameter counts
    shown = page(study, "Headline")
    assert "S-pc lacks seed 4, 5, 6." in shown
    assert "Comparison with G-cg-q-12o" in shown
    assert "claims" not in shown
    assert "| R-cg-q-12o | 1.300 |  |  |  |" in markdown(study)


def test_softmax_and_hyperglu_with_equal_convolutions(tmp_path, write_row):
    """The means and the difference are those of the seeds that both rows have."""
    losses = {"S-p": [1.3, 1.5, 9.0], "G-g-q-12o": [1.2, 1.2], "S-p+canon": [1.0], "G-g-q-12o+canon": [1.125]}
    for row, by_seed in losses.items():
        write_row(MIXING, row, 8e-3, by_seed)
    study = read_study(tmp_path)
    assert study.size == MIXING
    assert convolution_table(study).rows == [
        ["none", "S-p", "1.400", "G-g-q-12o", "1.200", "2", "+0.200 (-1.071 to +1.471)"],
        ["Canon layers", "S-p+canon", "1.000", "G-g-q-12o+canon", "1.125", "1", "-0.125 (no interval)"],
    ]
    assert convolution_table(study).markdown() in markdown(study)
    assert "softmax attention with the same convolutions?" in page(study, "the study")


def test_the_factorial_reports_its_tuning_seed_too(tmp_path, write_row, write_lm, capsys):
    """Its folder may have records of headline: further rates, which it does not choose, and further seeds."""
    write_row(HEADLINE, "S-p", 1.6e-2, [])
    write_lm(tmp_path, lm_cell(HEADLINE, "S-p", 2, 8e-3), 1.25)
    write_lm(tmp_path, lm_cell(HEADLINE, "S-p", 3, 8e-3), 1.35)
    write_row(FACTORIAL, "S-pg", 4e-3, [1.5])
    study = read_study(tmp_path)
    assert study.size == FACTORIAL
    assert study.rows["S-p"].rate == 8e-3
    assert study.rows["S-p"].losses == {1: 2.0, 2: 1.25}
    assert study.rows["S-pg"].losses == {1: 1.0, 2: 1.5}
    assert [name.split("-")[2] for name in study.unlisted] == ["3"]
    assert len(study.labels) == 42
    assert main(["study", "report", str(tmp_path), "--size", "headline"]) == 0
    assert "No loss for S-p: only the tuning seed has been run." in capsys.readouterr().out
    assert main(["study", "report", str(tmp_path), "--size", "large"]) == 2
    assert "unknown size 'large'" in capsys.readouterr().err
