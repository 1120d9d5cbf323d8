"""The rows and the sizes of the study as data."""

import itertools

import pytest

from hypermlp.costs.model import model_parameters
from hypermlp.jobs.cells import record_path
from hypermlp.label import Label
from hypermlp.study.claims import CLAIMED
from hypermlp.study.protocol import (
    CANON,
    FACTORIAL_ROWS,
    ROWS,
    SIZES,
    find_rows,
    lm_cell,
    lm_cells,
    tuning_cells,
)
from hypermlp.train.recipe import Recipe, build

HEADLINE, MIXING, FACTORIAL = SIZES["headline"], SIZES["mixing"], SIZES["factorial"]


def test_there_are_33_rows_and_two_other_readings():
    assert len(ROWS) == len(set(ROWS)) == 35


def test_sizes_cover_every_row_and_the_claims_with_more_seeds():
    mini = list(lm_cells(SIZES["mini"], ROWS))
    assert {cell.mixer for cell in mini} == set(ROWS)
    assert all(len({cell.seed for cell in mini if cell.mixer == row}) == 3 for row in CLAIMED)
    full = next(lm_cells(SIZES["full"], ["R"]))
    assert full.recipe["training"]["steps"] == 40_000


def test_rows_differ_in_nothing_but_the_label_and_the_seed():
    def common(cell):
        recipe = {part: dict(cell.recipe[part]) for part in ("model", "data", "training")}
        recipe["model"]["mixer"], recipe["training"]["seed"] = "", 0
        return recipe

    first, *others = lm_cells(SIZES["mini"], ROWS)
    assert all(common(cell) == common(first) for cell in others)


def test_study_tune_uses_rows_that_no_claim_compares():
    tuned = list(tuning_cells(SIZES["mini"]))
    assert not {cell.mixer for cell in tuned} & CLAIMED
    assert len({cell.rate for cell in tuned}) > 2


def test_the_factorial_crosses_all_ideas():
    """Every level of an idea is combined once with all combinations of the others; six rows are added."""
    crossed = [Label.parse(row.removesuffix(CANON)) for row in FACTORIAL_ROWS]
    levels = [
        (label.base, label.mix, "g" in label.features, "c" in label.features, row.endswith(CANON))
        for label, row in zip(crossed, FACTORIAL_ROWS, strict=True)
    ]
    convolutions = [(False, False), (True, False), (False, True)]
    combinations = itertools.product("SRG", ("", "12"), (False, True), convolutions)
    assert sorted(levels) == sorted((*rest, *pair) for *rest, pair in combinations)
    assert all("p" in label.features and not label.rank for label in crossed)
    assert len(set(FACTORIAL.rows)) == 42
    assert {FACTORIAL.rates_of(row) for row in FACTORIAL.rows if row.startswith("S")} == {(4e-3, 8e-3)}
    assert {FACTORIAL.rates_of(row) for row in FACTORIAL.rows if row[0] != "S"} == {(8e-3, 1.6e-2)}


@pytest.mark.parametrize("size", [MIXING, FACTORIAL])
def test_sizes_share_the_cells_of_headline(tmp_path, size):
    shared = [row for row in ("S-p", "S-pc", "G-cg-q-12o") if row in size.rows]
    for row in shared:
        one, other = (lm_cell(each, row, 2, 8e-3) for each in (HEADLINE, size))
        assert record_path(tmp_path, one) == record_path(tmp_path, other)
    assert len(shared) >= 2


@pytest.mark.parametrize("size", [MIXING, FACTORIAL])
def test_all_rows_have_equal_parameters(size):
    rows = {*MIXING.rows[:1], *size.rows, "S-p+canon"}
    recipes = {row: build(Recipe, lm_cell(size, row, 2, 8e-3).recipe, "") for row in rows}
    counts = {row: model_parameters(recipe.model_config(257)) for row, recipe in recipes.items()}
    assert all(abs(count / counts["G-cg-q-12o"] - 1) < 0.005 for count in counts.values()), counts
    assert recipes["S-p+canon"].model["canon"] == "ABCD"
    assert "canon" not in recipes["S-p"].model


def test_reported_seeds():
    """The tuning seed is not among them, and rows that claims use have a further one."""
    mini = list(lm_cells(SIZES["mini"], ["S-p", "R-g-q-12o"], {"S-p": 4e-3, "R-g-q-12o": 8e-3}))
    assert [(cell.mixer, cell.seed, cell.rate) for cell in mini] == [
        ("S-p", 2, 4e-3),
        ("R-g-q-12o", 2, 8e-3),
        ("S-p", 3, 4e-3),
        ("R-g-q-12o", 3, 8e-3),
        ("S-p", 4, 4e-3),
    ]
    seeds = {row: [cell.seed for cell in lm_cells(HEADLINE, [row])] for row in HEADLINE.rows}
    five = [2, 3, 4, 5, 6]
    assert seeds == {"G-cg-q-12o": five, "S-p": five, "S-pc": five, "R-cg-q-12o": five[:3]}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_reference_is_a_row_of_its_size(size):
    assert not size.reference or size.reference in size.rows


def test_names_of_rows():
    assert find_rows(["S-p+canon", "fox"], MIXING) == ["S-p+canon", "fox"]
    with pytest.raises(ValueError, match="only labels have Canon layers"):
        find_rows(["fox+canon"], MIXING)
    with pytest.raises(ValueError, match="unknown mixer"):
        find_rows(["nothing+canon"], MIXING)
