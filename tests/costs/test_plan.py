"""The planned costs equal those of models that are built or trained here."""

import json

import pytest
from torch import nn
from transformers import GPT2Config

from hypermlp.bench.lm import training_step
from hypermlp.bench.measure import peak_bytes
from hypermlp.cli import main
from hypermlp.costs.mixer import CORE_PARTS
from hypermlp.costs.model import model_flops_table, model_parameters, model_state_bytes, step_bytes
from hypermlp.costs.plan import GPUS, even, make_plan
from hypermlp.layers.gates import Gates
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.ops.dispatch import use_backend
from hypermlp.train.data import prepare
from hypermlp.train.recipe import load_recipe

SMALL = ["training.micro_batch=4", "training.batch_tokens=4096", "data.limit=200000"]
FORMS = [
    [],
    ["model.block=llama"],
    ["model.mixer=S-p"],
    ["model.mixer=gla"],
    ["model.tie_word_embeddings=false", "model.learned_positions=true"],
]


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_parameters_are_the_models(changes):
    config = load_recipe("demo", changes).model_config(257)
    assert model_parameters(config) == sum(p.numel() for p in HyperMLPForCausalLM(config).parameters())


LONG = ["data.context=2048", "training.micro_batch=1"]
FURTHER = [
    ["training.precision=bfloat16"],
    ["training.gradient_checkpointing=true"],
    LONG,
    [*LONG, "model.mixer=R-cg-q-12o"],
]


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [*FORMS, *FURTHER], ids=str)
def test_memory_is_within_15_percent_of_a_real_step(changes):
    recipe = load_recipe("cpu-mini", [*SMALL, *changes])
    prepared = prepare(recipe.data)
    step = training_step(recipe, prepared)
    step()  # the first step allocates AdamW's moments
    with use_backend("blocked"):
        real = peak_bytes(step)
    config = recipe.model_config(len(prepared.tokenizer))
    assert step_bytes(recipe, config, accumulation=1, device="cpu") == pytest.approx(real, rel=0.15)


def test_flops_outside_the_core_are_those_of_the_products():
    """The sum covers every linear layer and the head; tests/costs/test_mixer.py tests the core."""
    config = load_recipe("demo").model_config(257)
    model = HyperMLPForCausalLM(config).eval()
    inside = [module for module in model.modules() if isinstance(module, nn.Linear | Gates)]
    seen = 0

    def count(module, given):
        nonlocal seen
        seen += 2 * given[0][..., 0].numel() * module.weight.numel()

    for module in inside:
        module.register_forward_pre_hook(count)
    length = 64
    model(input_ids=model.dummy_inputs["input_ids"].new_zeros(1, length), use_cache=False)
    parts = model_flops_table(config, length)
    outside = {
        part: flops
        for part, flops in parts.items()
        if part.removeprefix("mixer: ") not in (*CORE_PARTS, "conv")
    }
    assert sum(outside.values()) == seen


@pytest.fixture(scope="module")
def plan():
    def make(*changes, count=1, nodes=1, gpu="h100"):
        recipe = load_recipe("demo", list(changes))
        return make_plan(recipe, vocab_size=257, gpu=GPUS[gpu], count=count, nodes=nodes, utilisation=0.5)

    return make


def test_sharding_divides_the_state_and_more_gpus_the_arithmetic(plan):
    one, two = plan(), plan("training.sharding=true", "training.micro_batch=8", count=2)
    assert two.held_bytes == one.held_bytes // 2
    assert two.arithmetic_seconds == pytest.approx(one.arithmetic_seconds / 2)
    # The recipe demo trains in float32.
    assert one.arithmetic_seconds == pytest.approx(one.training_flops_per_token * 4096 / (0.5 * 67e12))
    assert one.communication_seconds == 0
    assert one.steps * one.step_seconds == one.seconds


def test_mixes_are_planned_at_the_rate_of_float32():
    recipe = load_recipe("demo", ["training.precision=bfloat16"])
    given = {"vocab_size": 257, "gpu": GPUS["h100"], "count": 1, "nodes": 1, "utilisation": 1.0}
    parts = model_flops_table(recipe.model_config(257), 256)
    total, mixes = sum(parts.values()), parts["mixer: mix1"] + parts["mixer: mix2"]
    seconds = make_plan(recipe, **given).arithmetic_seconds
    assert seconds == pytest.approx(3 * 4096 / 256 * ((total - mixes) / 989e12 + mixes / 67e12))


def test_progress_ends_with_the_whole():
    seen = []
    recipe = load_recipe("demo")
    step_bytes(recipe, recipe.model_config(257), 2, on_progress=seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 12  # three blocks, forward and backward, two micro-batches
    assert seen[-1] == 1


def test_what_limits(plan):
    assert plan().limit.startswith("arithmetic")
    small = ["training.micro_batch=8", "training.precision=bfloat16"]
    assert plan(*small, count=2, nodes=2).limit.startswith("communication"), "a small model, and a network"
    huge = ["model.hidden_size=16384", "model.num_hidden_layers=16", "training.gradient_checkpointing=true"]
    assert plan(*huge).limit.startswith("memory")


def test_the_decoding_state_is_smaller_than_that_of_softmax_attention(plan):
    found = plan()
    assert found.decode_bytes_per_token < 0.7 * found.softmax_decode_bytes_per_token


def test_the_commands(capsys):
    assert main(["plan", "demo", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main(["plan", "demo"]) == 0
    assert "| limited by | arithmetic" in capsys.readouterr().out
    assert main(["flops", "demo", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = load_recipe("demo").model_config(257)
    assert sum(found["parameters"].values()) == model_parameters(config)
    assert found["state_bytes"] == model_state_bytes(config, config.max_position_embeddings)
    assert main(["flops", "demo"]) == 0
    assert "| the same with softmax attention |" in capsys.readouterr().out


@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", 257), ("bpe:8000", 8000), ("gpt2", 50_257)])
def test_the_vocabulary_is_the_tokenizers(tokenizer, size, capsys):
    assert main(["flops", "demo", "--set", f"data.tokenizer={tokenizer}", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["embeddings"] == 128 * size


def test_a_model_can_be_planned_without_a_recipe(tmp_path, capsys):
    config = load_recipe("demo").model_config(257)
    config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(place), "--set", "training.steps=2000", "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == model_parameters(config)
        assert found["steps"] == 2000
        assert main(["flops", str(place), "--json", "-"]) == 0
        assert sum(json.loads(capsys.readouterr().out)["parameters"].values()) == model_parameters(config)


def test_the_micro_batch_comes_out_even_on_many_gpus(capsys):
    assert even(load_recipe("lm-1.3b"), 64).training.micro_batch == 2, "128 sequences"
    assert main(["plan", "demo", "--count", "8", "--nodes", "2"]) == 0
    assert (
        "8 GPUs x 1 micro-batch x 2 sequences of 256 (the recipe's 16 do not divide the batch evenly)"
        in capsys.readouterr().out
    )


def test_a_model_of_another_kind_is_refused(tmp_path, capsys):
    GPT2Config().save_pretrained(tmp_path)
    for command in ("flops", "plan", "sample"):
        assert main([command, str(tmp_path)]) == 2
        assert "a model of type 'gpt2'; allowed: 'hypermlp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flops", "demo", "--vocab", "-3"], "--vocab is -3"),
        (
            ["flops", "demo", "--set", "data.tokenizer=somebody/tokenizer"],
            "the size of tokenizer 'somebody/tokenizer' is not known",
        ),
        (["plan", "demo", "--set", "model.num_hidden_layers=-1"], "num_hidden_layers is -1"),
        (["plan", "demo", "--set", "model.hidden_size=1e3"], "expected int, got str (value: '1e3')"),
        (
            ["plan", "demo", "--set", "model.vocab_size=100"],
            "model.vocab_size is 100; it must be at least the tokenizer's 257",
        ),
        (["plan", "lm-340m", "--count", "0"], "--count"),
        (["plan", "lm-340m", "--count", "3"], "training.batch_tokens is 524288; it must be a multiple of"),
        (
            ["plan", "lm-340m", "--count", "8", "--nodes", "3"],
            "--nodes is 3; it must be a divisor of --count = 8",
        ),
        (["flops", "demo", "--length", "100000"], "--length is 100000"),
        (["flops", "nothing"], "nothing"),
        (["flops", "tests"], "tests has no model"),
        (["plan", "tests", "--set", "model.rank=4"], "--set cannot change the model of tests"),
    ],
)
def test_errors_before_work(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err
