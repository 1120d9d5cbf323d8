"""The size ``mixing``: the headline comparison with Canon layers, FoX, and HyperGLU without convolution."""

import dataclasses

import pytest

from hypermlp.cli import main
from hypermlp.costs.model import model_parameters
from hypermlp.jobs.cells import record_path, recorded
from hypermlp.label import Label
from hypermlp.study import protocol
from hypermlp.study.contrast import contrast_table, convolution_table
from hypermlp.study.missing import missing
from hypermlp.study.protocol import CANON, FACTORIAL_ROWS, SIZES, find_rows, lm_cell
from hypermlp.study.report import markdown, page
from hypermlp.study.summary import read_study
from hypermlp.train.recipe import Recipe, build

HEADLINE, MIXING = SIZES["headline"], SIZES["mixing"]


def test_the_factorial_crosses_all_ideas():
    """Every level of an idea is combined equally often with every level of each other one."""
    size = SIZES["factorial"]
    assert len(set(size.rows)) == 42
    crossed = [Label.parse(row.removesuffix(CANON)) for row in FACTORIAL_ROWS]
    levels = [
        (label.base, label.mix, "g" in label.features, "c" in label.features, row.endswith(CANON))
        for label, row in zip(crossed, FACTORIAL_ROWS, strict=True)
    ]
    assert len(set(levels)) == 3 * 2 * 2 * 3 == len(levels)
    assert all("p" in label.features and not label.rank for label in crossed)
    assert {size.rates_of(row) for row in size.rows if row.startswith("S")} == {(4e-3, 8e-3)}
    assert {size.rates_of(row) for row in size.rows if not row.startswith("S")} == {(8e-3, 1.6e-2)}


def test_both_sizes_share_their_cells(tmp_path):
    assert set(HEADLINE.rows) < set(MIXING.rows)
    for row in HEADLINE.rows:
        one, other = (lm_cell(size, row, 2, 8e-3) for size in (HEADLINE, MIXING))
        assert record_path(tmp_path, one) == record_path(tmp_path, other)


@pytest.mark.parametrize("size", [MIXING, SIZES["factorial"]])
def test_all_rows_have_equal_parameters(size):
    rows = {*MIXING.rows[:1], *size.rows, "S-p+canon"}
    recipes = {row: build(Recipe, lm_cell(size, row, 2, 8e-3).recipe, "") for row in rows}
    counts = {row: model_parameters(recipe.model_config(257)) for row, recipe in recipes.items()}
    assert all(abs(count / counts["G-cg-q-12o"] - 1) < 0.005 for count in counts.values()), counts
    assert recipes["S-p+canon"].model["canon"] == "ABCD"
    assert "canon" not in recipes["S-p"].model


def test_one_table_has_the_rows_of_both_sizes(tmp_path, write_lm):
    for row, loss in (("G-cg-q-12o", 1.1), ("S-p+canon", 1.15), ("fox", 1.2)):
        for rate in MIXING.rates:
            write_lm(tmp_path, lm_cell(MIXING, row, 1, rate), loss + abs(rate - 8e-3))
        for seed in MIXING.seeds:
            write_lm(tmp_path, lm_cell(MIXING, row, seed, 8e-3), loss + seed / 100)
    study = read_study(tmp_path)
    assert study.size == MIXING
    lines = {line[0]: line for line in contrast_table(study, "G-cg-q-12o").rows}
    assert set(lines) == set(MIXING.rows)
    assert lines["S-p+canon"][5] == "+0.050 (+0.050 to +0.050)"
    (sentence,) = missing(study)
    assert sentence == "No language model was trained for S-p, S-pc, R-cg-q-12o, G-g-q-12o, G-g-q-12o+canon."


def test_softmax_and_hyperglu_with_equal_convolutions(tmp_path, write_lm):
    """The means and the difference are those of the seeds that both rows have."""
    losses = {
        "S-p": {2: 1.3, 3: 1.5, 4: 9.0},
        "G-g-q-12o": {2: 1.2, 3: 1.2},
        "S-p+canon": {2: 1.0},
        "G-g-q-12o+canon": {2: 1.125},
    }
    for row, by_seed in losses.items():
        for seed, loss in {1: 2.0, **by_seed}.items():
            write_lm(tmp_path, lm_cell(MIXING, row, seed, 8e-3), loss)
        for rate in (4e-3, 1.6e-2, 3.2e-2):
            write_lm(tmp_path, lm_cell(MIXING, row, 1, rate), 3.0)
    study = read_study(tmp_path)
    assert convolution_table(study).rows == [
        ["none", "S-p", "1.400", "G-g-q-12o", "1.200", "2", "+0.200 (-1.071 to +1.471)"],
        ["Canon layers", "S-p+canon", "1.000", "G-g-q-12o+canon", "1.125", "1", "-0.125 (no interval)"],
    ]
    assert convolution_table(study).markdown() in markdown(study)
    assert "softmax attention with the same convolutions?" in page(study, "the study")


def test_names_of_rows():
    assert find_rows(["S-p+canon", "fox"], MIXING) == ["S-p+canon", "fox"]
    with pytest.raises(ValueError, match="only labels have Canon layers"):
        find_rows(["fox+canon"], MIXING)
    with pytest.raises(ValueError, match="unknown mixer"):
        find_rows(["nothing+canon"], MIXING)


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_the_new_rows_train(tmp_path, monkeypatch):
    smoke = dataclasses.replace(
        SIZES["smoke"], rows=("G-g-q-12o+canon", "S-p+canon", "fox"), mad="", rates=(1e-3, 2e-3), seeds=(2,)
    )
    monkeypatch.setitem(protocol.SIZES, "smoke", smoke)
    assert main(["study", "run", "--size", "smoke", "--out", str(tmp_path), "--threads", "1"]) == 0
    for row in smoke.rows:
        found = [recorded(tmp_path, lm_cell(smoke, row, 2, rate)) for rate in smoke.rates]
        assert sum(result is not None for result in found) == 1
    assert main(["study", "report", str(tmp_path)]) == 0
