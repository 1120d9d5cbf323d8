"""Every statement holds; every check fails for a broken operator; every planted mistake is caught."""

import json
import re
from pathlib import Path

import pytest
import torch

from hypermlp.cli import main
from hypermlp.paper.statements import cite
from hypermlp.theory.objects import Step, random_layer, random_rows
from hypermlp.theory.verify import CHECKS, INTRODUCTION
from tests.theory.conftest import MISTAKES, NONSENSE, NOT_A_NUMBER

CASES = [pytest.param(check, base, id=f"{check.name}-{base}") for check in CHECKS for base in check.bases]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("check", "base"), CASES)
def test_the_statement_holds(check, base):
    assert check.statement
    assert check.quantity
    outcome = check.run(base)
    assert outcome.passed, f"measured {outcome.measured}, tolerance {check.tolerance}"


@pytest.mark.parametrize(("check", "base"), CASES)
def test_a_broken_operator_fails_the_check(check, base, planted):
    with planted(NONSENSE):
        if not check.run(base).passed:
            return
    with planted(MISTAKES["mixes are left out"]):
        assert not check.run(base).passed


# These count the operations of the definition and do not look at results.
COUNTS = {"a-step-costs-what-it-should", "training-overhead-is-quadratic-times-rank"}


@pytest.mark.parametrize(("check", "base"), [case for case in CASES if case.values[0].name not in COUNTS])
def test_nan_fails_the_check(check, base, planted):
    with planted(NOT_A_NUMBER):
        assert not check.run(base).passed


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake, planted):
    with planted(MISTAKES[mistake]):
        assert any(not check.run(base).passed for check in CHECKS for base in check.bases)


@pytest.mark.parametrize("base", ["R", "G"])
def test_a_mistake_reaches_the_layer(base, planted):
    layer, X = random_layer(f"{base}-cg-q-12o"), random_rows(9)
    expected = layer(X[None])
    with planted({}):
        torch.testing.assert_close(layer(X[None]), expected)
    with planted(MISTAKES["no norm"]), pytest.raises(AssertionError):
        torch.testing.assert_close(layer(X[None]), expected)


@pytest.mark.parametrize("label", ["R-cg-q-12o", "G-cg-q-12o", "R-12!", "G-c-v", "R"])
def test_a_step_is_what_the_layer_does(label):
    layer, X = random_layer(label), random_rows(9)
    torch.testing.assert_close(Step(layer, X).real(X[-1]), layer(X[None])[0, -1])


def test_the_command(capsys):
    assert main(["verify", "--only", "truncation", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {outcome["layer"] for outcome in found} == {"HyperMLP", "HyperGLU"}
    keys = {
        "name",
        "layer",
        "statement",
        "where",
        "says",
        "measured",
        "tolerance",
        "at_least",
        "passed",
        "seconds",
    }
    assert all(outcome.keys() == keys for outcome in found)
    assert main(["verify", "--only", "nothing of the kind"]) == 2
    assert "no check contains 'nothing of the kind'" in capsys.readouterr().err


def test_a_failure_is_an_error(planted, capsys):
    with planted(NONSENSE):
        assert main(["verify", "--only", "dynamic-two"]) == 2
    assert "the-layer-is-a-dynamic-two-layer-mlp (HyperMLP)" in capsys.readouterr().err


def test_the_document_is_up_to_date():
    text = (ROOT / "docs" / "theory.md").read_text()
    assert text.startswith(INTRODUCTION)
    rows = [line for line in text.removeprefix(INTRODUCTION).splitlines() if line.endswith("| passed |")]
    for row, check in zip(rows, CHECKS, strict=True):
        quantity = check.quantity.replace("|", "\\|")
        assert row.startswith(f"| {check.statement} | {check.where} | {quantity} |")


def test_statements_are_cited_by_number_and_title():
    assert cite("Theorem thm:core_lag_layout (i)").startswith("Theorem 2.3 (i): Lag layout: extension")
    for each in CHECKS:
        assert not re.search(r"\b(thm|lem|prop|cor|rem|sec|eq):", each.where)
