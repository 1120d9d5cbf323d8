"""The models that come with the package are what their cards say, and every command finds them."""

import json
import shutil

import pytest
import torch

import hypermlp
from hypermlp.checkpoints import HELD_OUT, MODELS, find_shipped
from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.models.loading import model_folder
from hypermlp.sealed import file_digest, problem
from hypermlp.train.data import held_out, prepare
from hypermlp.train.publish import CARD, held_out_loss, model_card, publish
from hypermlp.train.recipe import load_recipe
from hypermlp.train.run import train

NAMES = list(MODELS.values())


def card(name):
    return json.loads((find_shipped(name) / CARD).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_card_describes_the_folder(name):
    folder = find_shipped(name)
    assert problem(folder) is None
    config = HyperMLPConfig.from_pretrained(folder)
    assert (folder / "README.md").read_text() == model_card(card(name), load_recipe(name), config)
    assert card(name)["sha256"] == file_digest(folder / "model.safetensors")
    model = HyperMLPForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == card(name)["parameters"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(x, x.bfloat16().float()) for x in model.parameters())


def test_the_two_models_differ_in_their_mixer_alone():
    ours, softmax = (load_recipe(name).to_dict() for name in NAMES)
    assert (ours["model"].pop("mixer"), softmax["model"].pop("mixer")) == ("G-cg-q-12o", "S-p")
    for recipe in (ours, softmax):  # each has its best learning rate
        del recipe["name"], recipe["training"]["learning_rate"], recipe["training"]["min_learning_rate"]
    assert ours == softmax
    assert card("tiny")["data_digest"] == card("tiny-softmax")["data_digest"]
    assert abs(card("tiny")["parameters"] / card("tiny-softmax")["parameters"] - 1) < 0.005


def test_the_held_out_file_was_held_out():
    for name in NAMES:
        assert held_out(HELD_OUT.read_text(), load_recipe(name).data.validation)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thorough
def test_loss_on_the_held_out_file(name):
    assert held_out_loss(name) == pytest.approx(card(name)["held_out_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_again(name, tmp_path):
    """Two trainings give the same bits, and the losses of the card if the data is the card's."""
    expected, recipe = card(name), load_recipe(name)
    first = len(expected["first_losses"])
    changes = [f"training.steps={first}", f"training.decay_steps={recipe.training.steps}"]
    recipe = load_recipe(name, [*changes, f"training.save_every={first}", "training.eval_sequences=1"])
    ends = [train(recipe, tmp_path / again) for again in ("one", "two")]
    assert file_digest(ends[0] / "model.safetensors") == file_digest(ends[1] / "model.safetensors")
    if prepare(recipe.data).digest != expected["data_digest"]:
        pytest.skip(f"the card's data is the standard library of Python {expected['python']}")
    records = map(json.loads, (tmp_path / "one" / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[:10] == pytest.approx(expected["first_losses"][:10], abs=1e-3)
    # The card's losses were made with other kernels, whose roundings grow with every step.
    assert losses == pytest.approx(expected["first_losses"], abs=5e-2)


@pytest.mark.thorough
def test_a_run_becomes_a_folder_again(recipe_file, tmp_path):
    settings = [
        "training.steps=20",
        "training.warmup_steps=1",
        "training.log_every=1",
        "training.eval_every=20",
    ]
    recipe = load_recipe(str(recipe_file), [*settings, "model.mixer=S-p", "data.context=32"])
    train(recipe, tmp_path / "run")
    publish(tmp_path / "run", tmp_path / "made")
    made = json.loads((tmp_path / "made" / CARD).read_text())
    assert problem(tmp_path / "made") is None
    assert len(made["first_losses"]) == 20
    assert f"{made['held_out_loss']:.4f} nats per byte" in (tmp_path / "made" / "README.md").read_text()
    with pytest.raises(UserError, match="has no recipe.json"):
        publish(tmp_path / "made", tmp_path / "other")
    shutil.rmtree(tmp_path / "run")
    train(load_recipe(str(recipe_file), settings), tmp_path / "run")
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(records[:5] + records[6:]))
    with pytest.raises(UserError, match="no loss for each of the first 20 steps"):
        publish(tmp_path / "run", tmp_path / "other")


def test_the_folder_of_a_model():
    assert (
        hypermlp.tiny("tiny-softmax")
        == hypermlp.tiny("softmax")
        == find_shipped("tiny-softmax")
        == model_folder("tiny-softmax")
    )
    with pytest.raises(
        UserError, match="unknown mixer of a shipped model 'rwkv'; allowed: hyperglu, softmax"
    ):
        hypermlp.tiny("rwkv")


def test_a_folder_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(UserError, match="tiny has no model"):
        model_folder("tiny")


def test_commands_find_the_models_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "tiny", "def ", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    assert main(["inspect", "tiny", "--prompt", "def f(x):"]) == 0
    assert (tmp_path / "inspect.html").stat().st_size > 10_000
    assert main(["flops", "tiny-softmax"]) == 0
    assert main(["sample", "tinny"]) == 2
    assert "tiny or tiny-softmax, which come with the package" in capsys.readouterr().err


@pytest.mark.thorough
def test_evaluation_and_training_begin_with_a_shipped_model(tmp_path, capsys):
    assert main(["eval", "tiny", "tiny-softmax", "--limit", "1"]) == 0
    assert "| tiny-softmax |" in capsys.readouterr().out
    text = tmp_path / "mine.txt"
    text.write_text("def area(radius):\n    return 3 * radius ** 2\n" * 40)
    (tmp_path / "other.txt").write_text("import os\n" * 100)
    settings = [
        f"data.source={tmp_path}",
        "training.steps=1",
        "training.warmup_steps=1",
        "training.eval_sequences=1",
    ]
    small = [*settings, "training.batch_tokens=256", "training.micro_batch=1"]
    words = [word for setting in small for word in ("--set", setting)]
    assert main(["train", "tiny", "--init-from", "tiny", "--out", str(tmp_path / "run"), *words]) == 0
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert first["loss"] < 3  # an untrained model has 5.5
