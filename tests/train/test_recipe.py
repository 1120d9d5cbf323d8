"""Loading recipes: keys, types and values are checked, overrides and learning rates are resolved."""

import pytest
import yaml

from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.recipe import load_recipe


def test_values_and_overrides(recipe_file):
    recipe = load_recipe(
        str(recipe_file), ["training.learning_rate=6e-4", "training.steps=5", "model.mixer=S-p", "name=other"]
    )
    assert recipe.training.learning_rate == 6e-4
    assert (recipe.training.steps, recipe.model["mixer"], recipe.name) == (5, "S-p", "other")
    assert recipe.sequences_per_step == 8
    assert [recipe.accumulation(processes) for processes in (1, 2)] == [2, 1]
    config = recipe.model_config(257)
    assert (config.vocab_size, config.max_position_embeddings, config.mixer) == (257, 32, "S-p")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=5", r"'training.stepz' \(did you mean 'steps'\?\); allowed: training.steps"),
        ("training.clip=high", "training.clip is 'high'; it must be a number"),
        ("training.steps=soon", "training.steps is 'soon'; it must be a whole number"),
        ("training.steps=true", "training.steps is True; it must be a whole number"),
        ("training.steps=0", "training.steps is 0; it must be a positive integer"),
        ("training.batch_tokens=100", "a multiple of data.context = 32"),
        (
            "training.decay_steps=1",
            r"training.decay_steps is 1; it must be at least 2; raise decay_steps or lower",
        ),
        (
            "training.steps=1",
            r"training.steps is 1; it must be at least 2; raise steps or lower",
        ),
        ("training.betas=[a, b]", "two numbers"),
        ("training.seed=-1", "from 0 to 4294967295"),
        ("training.weight_decay=.inf", "a finite number, 0 or more"),
        ("training.min_learning_rate=.inf", "a finite number, 0 or more"),
        ("training.learning_rate=.inf", "a positive finite number"),
        ("model.mixer=[S-p,", "the value is not YAML"),
        ("model.mixer=&a [*a]", "the value is not YAML: Circular reference"),
        ("data.packing=tight", "'documents' or 'stream'"),
        ("data.streaming=true", "unless the source is hub:NAME"),
        ("model.depth=3", "'depth'; it must be a field of HyperMLPConfig"),
        ("steps=5", "section.key=value"),
        ("extra.key=5", "unknown recipe key 'extra'; allowed: name, model, data, training"),
    ],
)
def test_mistakes_are_reported_before_any_work(recipe_file, override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(str(recipe_file), [override])


def test_a_misspelled_recipe_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"no recipe 'cpu-minni' \(did you mean 'cpu-mini'\?\); allowed: "):
        load_recipe("cpu-minni")


RATES = "training.learning_rate={S-p: 1e-3, gla: 2e-3, default: 4e-3}"


@pytest.mark.parametrize(
    ("mixer", "rate"), [("S-p", 1e-3), ("gla", 2e-3), ("G-cg-q-12o", 4e-3), ("[S-p, gla]", 4e-3)]
)
def test_a_learning_rate_for_each_mixer(recipe_file, mixer, rate):
    """The table is resolved when the recipe is loaded, so records and digests hold a plain number."""
    table = load_recipe(str(recipe_file), [RATES, "training.min_learning_rate=10%", f"model.mixer={mixer}"])
    plain = load_recipe(
        str(recipe_file),
        [f"training.learning_rate={rate}", f"training.min_learning_rate={rate / 10}", f"model.mixer={mixer}"],
    )
    assert table == plain
    assert table.training.learning_rate == rate


def test_a_rate_may_be_given_by_the_papers_name():
    rates = "training.learning_rate={HyperGLU: 1e-3, default: 2e-3}"
    for mixer, rate in (("HyperGLU", 1e-3), ("G-cg-q-12o", 1e-3), ("null", 1e-3), ("HyperMLP", 2e-3)):
        assert load_recipe("cpu-mini", [rates, f"model.mixer={mixer}"]).training.learning_rate == rate


@pytest.mark.parametrize(
    ("mixer", "rate"),
    [
        ("S-p", 1e-3),
        ("S-pc", 2e-3),
        ("S-c-q", 3e-3),
        ("G-cg-q-12o", 5e-3),
        ("gla", 4e-3),
        ("[S-p, S-p]", 4e-3),
    ],
)
def test_a_learning_rate_for_each_family(recipe_file, mixer, rate):
    """A mixer has its own rate, else that of the longest pattern that it matches, else the default."""
    rates = "training.learning_rate={S-*: 3e-3, S-pc*: 2e-3, S-p: 1e-3, G-*: 5e-3, default: 4e-3}"
    assert load_recipe(str(recipe_file), [rates, f"model.mixer={mixer}"]).training.learning_rate == rate


def test_rates_in_yaml(recipe_file):
    content = yaml.safe_load(recipe_file.read_text())
    content["training"] |= {"learning_rate": {"G-cg-q-12o": "4e-3", "S-p": 1e-3}, "min_learning_rate": "5 %"}
    recipe_file.write_text(yaml.safe_dump(content))
    training = load_recipe(str(recipe_file)).training
    assert (training.learning_rate, training.min_learning_rate) == (4e-3, 2e-4)
    assert load_recipe(str(recipe_file), ["training.learning_rate=0.1"]).training.min_learning_rate == 0.005


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.learning_rate={S-p: 1e-3}"],
            r"model.mixer is 'G-cg-q-12o'; it must be a key of training.learning_rate \{'S-p': '1e-3'\}, or",
        ),
        (
            ["training.learning_rate={S-p: 1e-3}", "model.mixer=[S-p, S-p]"],
            r"model.mixer is \['S-p', 'S-p'\]",
        ),
        (["training.learning_rate={S-q: 1e-3, default: 1e-3, 3: 1e-3}"], "3"),
        (["training.learning_rate={spp: 1e-3, default: 1e-3}"], "unknown mixer 'spp'"),
        (["training.learning_rate={Q-*: 1e-3, default: 1e-3}"], r"unknown mixer 'Q-\*'"),
        (["training.learning_rate={default: fast}"], "training.learning_rate is 'fast'; it must be a number"),
        (["training.min_learning_rate=ten%"], "training.min_learning_rate, in percent, is 'ten'"),
        (
            ["training.min_learning_rate=-10%"],
            "training.min_learning_rate is -0.0002; it must be a finite number, 0 or more",
        ),
    ],
)
def test_rates_that_cannot_be_resolved(recipe_file, overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(str(recipe_file), overrides)


def test_impossible_combinations(recipe_file):
    recipe = load_recipe(str(recipe_file))
    with pytest.raises(ValueError, match="a multiple of 384: 12 sequences"):
        recipe.accumulation(3)
    with pytest.raises(ValueError, match="at least the tokenizer's 257"):
        load_recipe(str(recipe_file), ["model.vocab_size=100"]).model_config(257)
    with pytest.raises(ValueError, match="no recipe 'nothing'; allowed: a YAML file, or one of"):
        load_recipe("nothing")


def test_a_vocabulary_that_cannot_be(recipe_file):
    with pytest.raises(UserError, match="--vocab is 9223372036854775808; it must be a whole number"):
        load_recipe(str(recipe_file)).vocab_size(2**63)


def test_missing_keys(tmp_path):
    (tmp_path / "r.yaml").write_text("name: x\nmodel: {}\ndata: {}\ntraining: {steps: 3}\n")
    with pytest.raises(ValueError, match="the recipe has no training.batch_tokens, which it must give"):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize("override", ['model.hidden_size="32"', "model.mixer=5", "model.mixer=Q"])
def test_an_impossible_model_is_a_mistake_of_the_user(recipe_file, override):
    with pytest.raises(ValueError, match="model") as refused:
        load_recipe(str(recipe_file), [override]).model_config(257)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mixer", ["S-p", "S-pc", "R-cg-q-12o", "G-cg-q-12o", "gla"])
def test_parameters_are_matched_by_the_width_of_the_mlp(recipe_file, mixer):
    def count(*overrides):
        config = load_recipe(str(recipe_file), list(overrides)).model_config(257)
        return sum(parameter.numel() for parameter in HyperMLPForCausalLM(config).parameters())

    wanted = count("model.mixer=G-cg-q-12o", "model.hidden_size=64")
    assert count(
        f"model.mixer={mixer}", "model.hidden_size=64", "model.match_parameters=G-cg-q-12o"
    ) == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.match_parameters=Q"], "unknown mixer 'Q'"),
        (
            ["model.match_parameters=S-p", "model.intermediate_size=64"],
            "model.intermediate_size is 64; it must be left out",
        ),
        (
            [
                "model.match_parameters=S-p",
                "data.context=512",
                "training.batch_tokens=2048",
                "model.mixer=G-cg-q-12o",
            ],
            "some MLP width",
        ),
    ],
)
def test_parameters_that_cannot_be_matched(recipe_file, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(str(recipe_file), overrides).model_config(257)


@pytest.mark.parametrize(
    "content", [b"\x9b\xff", b"name: [", b"name: 2001-99-99", b"a: &a {b: *a}", b"[" * 5000], ids=len
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match="wrong.yaml is not YAML: ") as refused:
        load_recipe(str(path))
    assert "\n" not in str(refused.value)


def test_the_keys_are_listed_with_defaults_and_meanings(capsys):
    assert main(["train", "--keys"]) == 0
    printed = capsys.readouterr().out
    steps = "training.steps = required\n    Number of optimizer steps. It must be a positive integer.\n"
    assert steps in printed
    assert "data.context = 256\n    Tokens in a training sequence. It must be at least 2.\n" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_training_needs_a_recipe(capsys):
    assert main(["train"]) == 2
    assert "no recipe given; allowed: a YAML file, or one of cpu-mini" in capsys.readouterr().err
