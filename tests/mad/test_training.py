"""One cell: the protocol's backbones, accuracies and switches."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from hypermlp import mad
from hypermlp.mad.backbones import Autoencoder, LanguageBackbone, sinusoids
from hypermlp.mad.protocol import GRIDS, PUBLISHED, MadCell, Training, cells
from hypermlp.mad.training import evaluate, macro_accuracy, rate_at, run_cell

pytestmark = pytest.mark.thorough


def cell(**changes):
    training = Training(batch_size=32, epochs=2, precision="float32", learning_rate=3e-3)
    settings = {"vocab_size": 8, "seq_len": 16, "num_train": 256, "num_test": 64}
    base = {"mixer": "G-cg-q-12o", "task": "in-context-recall", "sampler": "fast", "width": 32, "seed": 1}
    return MadCell(**{**base, "settings": settings, "training": training, **changes})


def test_the_published_grid_is_complete():
    counts = {task: len(settings) for task, settings in PUBLISHED.items()}
    assert counts == {
        "in-context-recall": 11,
        "fuzzy-in-context-recall": 11,
        "noisy-in-context-recall": 14,
        "selective-copying": 13,
        "compression": 11,
        "memorization": 6,
    }
    published = list(cells("S-p", GRIDS["full"], list(mad.TASKS)))
    assert len(published) == 66 * 3 * 2  # settings, learning rates, weight decays
    assert all(settings[0] == {} for settings in PUBLISHED.values())


def test_the_backbone_has_the_published_size():
    """407,184 with the 8 x 128 biases of the published attention, which ours does not have."""
    model = LanguageBackbone("S-p", vocab_size=16, max_length=128)
    assert sum(p.numel() for p in model.parameters()) == 407_184 - 8 * 128
    assert model.layers[1].inner.up_proj.weight.shape == (352, 128)


def test_mixers_are_initialised_like_the_backbone():
    model = LanguageBackbone("G-cg-q-12o", vocab_size=16, max_length=128)
    weight = model.layers[0].inner.v_proj.weight
    assert weight.abs().max() < 128**-0.5
    assert float(weight.detach().std()) == pytest.approx(128**-0.5 / 3**0.5, rel=0.05)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not model.head.bias.any()
    encoder = Autoencoder("G-cg-q-12o", vocab_size=16, max_length=32)
    assert float(encoder.layers[0].inner.v_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_the_autoencoder_sees_the_last_position_only():
    model = Autoencoder("G-cg-q-12o", vocab_size=16, max_length=32, width=32)
    tokens = torch.randint(0, 16, (2, 32))
    assert model(tokens).shape == (2, 32, 16)
    kept = model.layers

    class Only(nn.Module):
        def forward(self, x):
            return torch.cat([torch.zeros_like(x[:, :-1]), kept(x)[:, -1:]], dim=1)

    expected = model(tokens)
    model.layers = Only()
    torch.testing.assert_close(model(tokens), expected)


def test_sinusoids():
    table = sinusoids(4, 6)
    assert table.shape == (4, 6)
    torch.testing.assert_close(table[3, :3], torch.tensor([3.0, 3e-2, 3e-4]).sin())
    torch.testing.assert_close(table[0, 3:], torch.ones(3))


def test_macro_accuracy_is_over_classes():
    assert macro_accuracy(torch.tensor([8, 9, 9, 3]), torch.tensor([8, 8, 9, 9])) == pytest.approx(1 / 3)
    assert macro_accuracy(torch.tensor([1, 1]), torch.tensor([1, 1])) == 1.0


def test_evaluation_weighs_batches_by_size_and_skips_ignored_targets():
    class Repeat(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(x, 4).float() * 10

    inputs = torch.tensor([[1, 2], [1, 3], [2, 2]])
    targets = torch.tensor([[1, -100], [2, 3], [2, 2]])
    found = evaluate(Repeat(), inputs, targets, 5, Training(batch_size=2, precision="float32"))
    assert found.micro == pytest.approx(4 / 5)
    first = (1 + 0 + 1) / 3  # classes 1, 2, 3 of the first batch
    assert found.macro == pytest.approx((2 * first + 1 * 1.0) / 3)
    assert found.step == 5


def test_a_cell_learns_and_is_reproducible():
    learned = run_cell(cell(training=replace(cell().training, epochs=12, evaluate_every=8)))
    assert learned["score"] > 0.9
    assert learned["steps"] <= 96
    again = run_cell(cell(training=replace(cell().training, epochs=12, evaluate_every=8)))
    assert learned["curve"] == again["curve"]


def test_it_stops_when_solved():
    result = run_cell(cell(training=replace(cell().training, epochs=50, evaluate_every=4, solved=0.6)))
    assert result["steps"] < 400
    assert result["curve"][-1][2] > 0.6
    assert all(row[2] <= 0.6 for row in result["curve"][:-1])


@pytest.mark.parametrize("score", ["best", "last"])
def test_the_score_is_of_the_best_or_of_the_last_evaluation(score):
    result = run_cell(cell(training=replace(cell().training, epochs=3, learning_rate=0.1, score=score)))
    rows = [dict(zip(result["curve_columns"], row, strict=True)) for row in result["curve"]]
    taken = min(rows, key=lambda row: row["perplexity"]) if score == "best" else rows[-1]
    assert result["score"] == taken["macro"]
    assert {"macro", "micro"} <= result.keys()


def test_the_schedule_is_constant_or_a_cosine():
    constant, cosine = Training(learning_rate=1e-3), Training(learning_rate=1e-3, schedule="cosine")
    assert {rate_at(passed, constant) for passed in (0, 0.5, 0.995)} == {1e-3}
    assert rate_at(0, cosine) == 1e-3
    assert rate_at(0.5, cosine) == pytest.approx((1e-3 + 1e-6) / 2)
    assert rate_at(1, cosine) == pytest.approx(1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_cosine_changes_the_training(epochs):
    constant, cosine = (
        run_cell(cell(training=replace(cell().training, epochs=epochs, schedule=s)))
        for s in ("constant", "cosine")
    )
    assert constant["curve"] != cosine["curve"]


def test_a_divergence_is_reported_and_can_be_recorded():
    result = run_cell(cell(training=replace(cell().training, learning_rate=1e30)))
    assert result["diverged"]
    assert "diverged" in cell().summary(result)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("task", mad.TASKS)
def test_every_task_runs(task):
    (small,) = cells("R-cg-q-12o", GRIDS["smoke"], [task])
    assert run_cell(small)["steps"] == 2


WRONG = [
    ({"schedule": "linear"}, "'constant' or 'cosine'"),
    ({"score": "mean"}, "'best' or 'last'"),
    ({"accuracy": "none"}, ""),
    ({"learning_rate": 0}, "a positive finite number"),
    ({"learning_rate": float("inf")}, "a positive finite number"),
    ({"weight_decay": "a"}, "a finite number, 0 or more"),
    ({"batch_size": 1.5}, ""),
    ({"evaluate_every": "a"}, ""),
]


@pytest.mark.parametrize(("change", "allowed"), WRONG, ids=str)
def test_errors_before_work(change, allowed):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be {allowed}"):
        Training(**change)
