"""The demonstration's exit code and its parts. `make demo` runs it in full."""

import pytest
import torch

from hypermlp.cli import main
from hypermlp.demo import language, recall, run
from hypermlp.demo.run import Expectation


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 2)])
def test_the_exit_code_tells_whether_all_expectations_hold(monkeypatch, capsys, tmp_path, holds, code):
    recall = run.Shown([Expectation("recall", "much", "some", holds)], {"HyperGLU": [(10, 0.5), (20, 0.9)]})
    losses = run.Shown([Expectation("loss", "low", "low", True)], {"HyperGLU": [(80, 3.0), (160, 2.0)]})
    monkeypatch.setattr(run, "show_recall", lambda console: recall)
    monkeypatch.setattr(run, "show_language", lambda console, folder: losses)
    assert main(["demo", "--out", str(tmp_path)]) == code
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert ("no" in out.split()) is not holds


def test_all_models_train_on_the_same_batches_in_turns(monkeypatch):
    seen = []
    monkeypatch.setattr(
        recall.Racer, "train", lambda self, inputs, targets: seen.append((self.label, inputs, targets))
    )
    field = recall.racers(0)
    assert len(list(recall.race(field, 0, most_steps=3))) == 3
    assert [label for label, *_ in seen] == ["G-cg-q-12o", "S-p", "S"] * 3
    for first in range(0, 9, 3):
        assert torch.equal(seen[first][1], seen[first + 2][1])
    assert not torch.equal(seen[0][1], seen[3][1])


def test_accuracy_counts_answers_only():
    racer = recall.racers(0)[0]
    inputs = torch.randint(0, 16, (2, 8))
    right = racer.model(inputs).argmax(-1)
    targets = torch.full_like(right, -100)
    targets[:, 3] = right[:, 3]
    targets[:, 5] = (right[:, 5] + 1) % 16
    racer.evaluate(inputs, targets)
    assert racer.accuracy == 0.5


def test_a_broken_cache_would_show(recipe_of_demo):
    model, tokenizer = recipe_of_demo
    text = "for name in sorted(names): print(name)"
    assert language.cache_error(model, tokenizer, text) < 1e-4
    whole = model.forward
    model.forward = lambda tokens, past_key_values=None, **kw: whole(tokens, **kw)  # ignores the cache
    assert language.cache_error(model, tokenizer, text) > 1e-2


def test_a_demo_that_was_stopped_says_how_to_go_on(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(language, "train", lambda recipe, folder, resume: asked.append(resume) or folder)
    with pytest.raises(ValueError, match=f"`hypermlp demo --out {tmp_path}` continues"):
        language.learn(None, tmp_path / "hyperglu")
    assert asked == [True]


@pytest.fixture
def recipe_of_demo(tmp_path):
    from hypermlp.train.data import prepare
    from hypermlp.train.recipe import load_recipe
    from hypermlp.train.run import build_model

    recipe = load_recipe(
        "demo", [f"data.cache={tmp_path}", "data.limit=100000", "model.initializer_range=0.2"]
    )
    prepared = prepare(recipe.data)
    return build_model(recipe, prepared, None).eval(), prepared.tokenizer
