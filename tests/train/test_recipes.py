"""The recipes of the package: size, optimizer groups, token arithmetic and sharding, on the meta device."""

import pytest
import torch

from hypermlp.costs.mixer import parameter_count
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.parameters import model_parameters
from hypermlp.train.recipe import RECIPE_FOLDERS, load_recipe
from hypermlp.train.schedule import learning_rate_factor, optimizer_groups
from hypermlp.train.sharding import sharded_dim

NAMES = ["demo", "cpu-mini", "long-context", "nanogpt-124m", "lm-340m", "lm-1.3b"]
VOCABULARY = {"nanogpt-124m": 50257, "lm-340m": 32000, "lm-1.3b": 32000}
SOFTMAX = {
    "nanogpt-124m": 123_587_328,
    "lm-340m": 341_099_520,
    "lm-1.3b": 1_298_761_728,
}  # parameters with softmax attention, as published


def build(name, *overrides):
    recipe = load_recipe(name, list(overrides))
    with torch.device("meta"):
        return recipe, HyperMLPForCausalLM(recipe.model_config(VOCABULARY.get(name, 257)))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_all_recipes_are_tested():
    assert {path.stem for folder in RECIPE_FOLDERS for path in folder.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_counted_parameters_equal_those_of_the_built_model(name):
    recipe, model = build(name)
    assert count(model) == model_parameters(model.config)
    assert recipe.accumulation(1) * recipe.training.micro_batch == recipe.sequences_per_step


@pytest.mark.parametrize("name", SOFTMAX)
def test_large_models_fit_the_budget(name):
    """With softmax attention the count is the published one; a HyperGLU layer is within the paper's 8 %."""
    _, softmax = build(name, "model.mixer=S-p")
    assert count(softmax) == SOFTMAX[name]
    _, model = build(name)
    assert abs(parameter_count(model.config.mixer_config(0)) / (4 * model.config.hidden_size**2) - 1) < 0.08
    assert abs(count(model) / SOFTMAX[name] - 1) < 0.025


@pytest.mark.parametrize("name", SOFTMAX)
def test_optimizer_groups(name):
    recipe, model = build(name)
    groups = optimizer_groups(model, recipe.training)
    assert sum(p.numel() for group in groups for p in group["params"]) == count(model)
    if recipe.training.decayed == "all":
        assert [group["weight_decay"] for group in groups] == [0.1]
    else:  # NanoGPT: mixes, convolutions and embeddings are decayed, norms and biases are not
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert all(p.dim() >= 2 for p in groups[0]["params"])
        assert all(p.dim() == 1 for p in groups[1]["params"])


@pytest.mark.parametrize(
    ("name", "steps", "tokens", "warmup"),
    [
        ("nanogpt-124m", 40_000, 491_520, 2_000),
        ("lm-340m", 28_610, 524_288, 1_907),
        ("lm-1.3b", 190_735, 524_288, 1_907),
    ],
)
def test_token_arithmetic(name, steps, tokens, warmup):
    recipe = load_recipe(name)
    training = recipe.training
    assert (training.steps, training.batch_tokens, training.warmup_steps) == (steps, tokens, warmup)
    if name == "nanogpt-124m":
        assert recipe.accumulation(1) == 40
        assert training.steps / training.eval_every == 80
        assert training.learning_rate * learning_rate_factor(0, training) == pytest.approx(6e-4 / 2001)
        assert training.learning_rate * learning_rate_factor(40_000, training) == pytest.approx(
            5.946e-4, rel=1e-4
        )
    else:
        wanted = {"lm-340m": 15e9, "lm-1.3b": 100e9}[name]
        assert steps == round(wanted / tokens)
        assert warmup == round(1e9 / tokens)
        assert learning_rate_factor(steps, training) == pytest.approx(0.1)
    assert learning_rate_factor(warmup, training) == 1.0


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_batch_is_the_same_on_any_number_of_processes(name, processes):
    recipe = load_recipe(name)
    together = recipe.accumulation(processes) * recipe.training.micro_batch * processes * recipe.data.context
    assert together == recipe.training.batch_tokens


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_sharding_plan_reaches_every_parameter(name):
    """Every block is sharded, the rest with the root; each of eight processes holds an eighth."""
    _, model = build(name)
    in_blocks = {id(p) for block in model.model.layers for p in block.parameters()}
    rest = [parameter for key, parameter in model.named_parameters() if id(parameter) not in in_blocks]
    assert {key for key, p in model.named_parameters() if id(p) not in in_blocks} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    assert sum(p.numel() for p in rest) < 0.35 * count(model)
    for p in model.parameters():
        assert p.shape[sharded_dim(p.shape, 8)] % 8 == 0
