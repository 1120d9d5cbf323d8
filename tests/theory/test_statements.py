"""Every statement holds; every check fails for a broken operator; ten and more planted mistakes are caught."""

import json
from pathlib import Path

import pytest
import torch

from hypermlp.cli import main
from hypermlp.commands.verify import INTRODUCTION
from hypermlp.theory.check import CHECKS, run
from hypermlp.theory.objects import Step, random_layer, random_rows
from tests.theory.conftest import MISTAKES, mistaken, nonsense, not_a_number

CASES = [pytest.param(found, base, id=f"{found.name}-{base}") for found in CHECKS for base in found.bases]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("found", "base"), CASES)
def test_the_statement_holds(found, base):
    outcome = run(found, base)
    assert outcome.passed, f"measured {outcome.measured}, tolerance {outcome.tolerance}"


@pytest.mark.parametrize(("found", "base"), CASES)
def test_a_broken_operator_fails_the_check(found, base, planted):
    with planted(nonsense):
        if not run(found, base).passed:
            return
    with planted(mistaken("mixes are left out")):
        assert not run(found, base).passed


COUNTS = {
    "a-step-costs-what-it-should",
    "training-overhead-is-quadratic-times-rank",
}  # operations of the definition, not results


@pytest.mark.parametrize(("found", "base"), [case for case in CASES if case.values[0].name not in COUNTS])
def test_what_is_not_a_number_fails_the_check(found, base, planted):
    with planted(not_a_number):
        assert not run(found, base).passed


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake, planted):
    with planted(mistaken(mistake)):
        for found in CHECKS:
            for base in found.bases:
                if not run(found, base).passed:
                    return
    pytest.fail(f"no check notices: {mistake}")


@pytest.mark.parametrize("base", ["R", "G"])
def test_without_a_mistake_the_planted_operator_is_the_real_one(base, planted):
    layer, X = random_layer(f"{base}-cg-q-12o"), random_rows(9)
    expected = layer(X[None])
    with planted(mistaken(None)):
        torch.testing.assert_close(layer(X[None]), expected)


@pytest.mark.parametrize("label", ["R-cg-q-12o", "G-cg-q-12o", "R-12!", "G-c-v", "R"])
def test_a_step_is_what_the_layer_does(label):
    layer, X = random_layer(label), random_rows(9)
    torch.testing.assert_close(Step(layer, X).real(X[-1]), layer(X[None])[0, -1])


def test_the_command(capsys):
    assert main(["verify", "--only", "truncation", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {outcome["layer"] for outcome in found} == {"HyperMLP", "HyperGLU"}
    assert all(
        outcome.keys() >= {"statement", "where", "measured", "tolerance", "passed"} for outcome in found
    )
    assert main(["verify", "--only", "nothing of the kind"]) == 2
    assert "no check contains" in capsys.readouterr().err


def test_a_failure_is_an_error(planted, capsys):
    with planted(nonsense):
        assert main(["verify", "--only", "dynamic-two"]) == 2
    assert "the-layer-is-a-dynamic-two-layer-mlp (HyperMLP)" in capsys.readouterr().err


def test_the_document_is_up_to_date():
    text = (ROOT / "docs" / "theory.md").read_text()
    assert text.startswith(INTRODUCTION)
    rows = [line for line in text.removeprefix(INTRODUCTION).splitlines() if line.endswith("| passed |")]
    shown = [tuple(row.removeprefix("| ").split(" | ")[:3]) for row in rows]
    assert shown == [(found.statement, found.where, found.says.replace("|", "\\|")) for found in CHECKS]
