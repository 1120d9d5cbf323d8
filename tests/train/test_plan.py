"""The plan is what the models are: counted against ones that run here."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hypermlp.cli import main
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.plan import activation_bytes, model_parameters, needs
from hypermlp.train.recipe import load_recipe


@pytest.mark.parametrize(
    "settings", [[], ["model.block=llama"], ["model.tie_word_embeddings=false"], ["model.learned_positions=true"]], ids=str
)
def test_parameters(settings):
    config = load_recipe("demo", settings).model_config(257)
    assert model_parameters(config) == sum(p.numel() for p in HyperMLPForCausalLM(config).parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_a_real_step_keeps(monkeypatch, precision, checkpointing):
    monkeypatch.setenv("HYPERMLP_BACKEND", "blocked")
    recipe = load_recipe("demo", [f"training.precision={precision}", "training.micro_batch=2"])
    recipe.training.gradient_checkpointing = checkpointing
    config = recipe.model_config(257)
    model = HyperMLPForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    kept, alive = {}, []

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    tokens = torch.zeros(2, recipe.data.context, dtype=torch.int64)
    with saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        model(tokens, labels=tokens, shift_labels=tokens, use_cache=False)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    real = sum(size for key, size in kept.items() if key not in own)
    assert activation_bytes(recipe, config) == pytest.approx(real, rel=0.01)


def test_sharding_divides_the_state_and_more_gpus_the_time():
    settings = {"vocab_size": 257, "peak": 1e12, "utilisation": 0.5}
    one = needs(load_recipe("demo"), count=1, **settings)
    two = needs(load_recipe("demo", ["training.sharding=true", "training.micro_batch=8"]), count=2, **settings)
    assert two.state_bytes == one.state_bytes // 2
    assert two.seconds == pytest.approx(one.seconds / 2)
    assert one.seconds == pytest.approx(one.flops_per_token * 320 * 4096 / 0.5e12)


def test_errors_before_work(capsys):
    assert main(["plan", "lm-340m", "--count", "0"]) == 2
    assert main(["plan", "lm-340m", "--count", "3"]) == 2
    assert "training.batch_tokens is 524288; it must be a multiple of" in capsys.readouterr().err
