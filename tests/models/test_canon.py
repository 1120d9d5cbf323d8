"""Canon layers: convolutions in a block that decode, pad and pack like everything else."""

import dataclasses

import pytest
import torch
from transformers import DynamicCache

from hypermlp.costs.model import (
    forward_flops_per_token,
    model_parameter_table,
    model_parameters,
    model_state_bytes,
)
from hypermlp.layers.canon import PLACES, TAPS, Canon
from hypermlp.layers.visibility import Visibility
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.ops.convolution import reference_conv
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.testing import assert_close, randomise_
from hypermlp.train.recipe import load_recipe

PLACEMENTS = ["A", "B", "C", "D", "ABCD"]
LENGTH = 17


def make(canon="ABCD", mixer="S-p", block="gpt2", **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 50, "rank": 3}
    sizes["max_position_embeddings"] = 32
    config = HyperMLPConfig(mixer=mixer, canon=canon, block=block, **(sizes | settings))
    return randomise_(HyperMLPForCausalLM(config)).double().eval()


def tokens(batch=2, length=LENGTH):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, run):
    out = run()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), list(model.parameters()))]


@pytest.mark.parametrize("canon", ["B", "C"])
def test_they_run_on_the_backend_of_the_layer(canon, monkeypatch):
    """One convolution each, on that backend."""
    model, ran = make(canon, "G-g-q-12o"), []
    for name in ("native", "blocked", "reference"):

        def convolution(x, weights, *rest, name=name):
            ran.append((name, len(weights)))
            return reference_conv(x, weights, *rest)

        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(BACKENDS[name], convolution=convolution))
    for block in model.model.layers:
        block.mixer.backend = "blocked"
    model(tokens())
    assert ran == [("blocked", 1)] * 2


def test_the_formula():
    layer, x = Canon(3).double(), torch.randn(1, 6, 3, dtype=torch.float64)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3]])
    out = layer(x, Visibility(starts, past=0, new=6, device=x.device))
    for t in range(6):
        first = int(starts[0, t])
        lags = [lag for lag in range(TAPS) if t - lag >= first]
        expected = x[0, t] + sum(layer.weight[:, lag] * x[0, t - lag] for lag in lags)
        assert_close(out[0, t], expected, tolerance=1e-12)


@pytest.mark.parametrize("mixer", ["gla", "fox"])
def test_baselines_have_no_canon_layer_inside_the_mixer(mixer):
    with pytest.raises(ValueError, match="without B in a model with baselines"):
        make("AB", mixer)


def test_the_cache_can_be_cropped_reordered_and_repeated():
    model, ids = make(), tokens()
    with torch.no_grad():
        full = model(ids).logits
        cache = DynamicCache(config=model.config)
        model(ids[:, :12], past_key_values=cache, use_cache=True)
        cache.crop(-5)
        out = model(ids[:, 7:], past_key_values=cache, use_cache=True).logits
        assert_close(out, full[:, 7:], tolerance=1e-10)
        cache = DynamicCache(config=model.config)
        model(ids[:, :9], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        out = model(ids[[1, 0], 9:], past_key_values=cache, use_cache=True).logits
        assert_close(out, full[[1, 0], 9:], tolerance=1e-10)
        cache = DynamicCache(config=model.config)
        model(ids[:, :9], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
        out = model(ids[[0, 0, 1, 1], 9:], past_key_values=cache, use_cache=True).logits
        assert_close(out, full[[0, 0, 1, 1], 9:], tolerance=1e-10)


@pytest.mark.parametrize(("canon", "mixer"), [("ACD", "S-pc"), ("ACD", "gla"), ("", "G-cg-q-12o")])
@pytest.mark.parametrize("failing", ["layers.0.mixer", "layers.1.mixer", "layers.1.mlp", "norm"])
def test_a_model_that_fails_leaves_all_states_as_they_were(canon, mixer, failing):
    model, ids = make(canon, mixer), tokens()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        full = model(ids).logits
        model(ids[:, :9], past_key_values=cache, use_cache=True)

        def fail(*_arguments):
            raise RuntimeError("out of memory")

        hook = model.model.get_submodule(failing).register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 9:], past_key_values=cache, use_cache=True)
        hook.remove()
        assert [layer.state.length for layer in cache.layers] == [9, 9]
        out = model(ids[:, 9:], past_key_values=cache, use_cache=True).logits
    assert_close(out, full[:, 9:], tolerance=1e-10)


@torch.no_grad()
def test_a_model_whose_layers_were_removed_decodes():
    """Each block keeps its own layer of the cache."""
    model, ids = make("", "G-cg-q-12o", num_hidden_layers=4), tokens()
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in (1, 3)])
    cache = DynamicCache(config=model.config)
    outs = [
        model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([8, 1, 1, 7], dim=1)
    ]
    assert_close(torch.cat(outs, dim=1), model(ids).logits, tolerance=1e-10)


def test_generation_and_saving(tmp_path):
    model, ids = make(pad_token_id=0).float(), tokens(length=6)
    cached = model.generate(ids, max_new_tokens=8, do_sample=False)
    for end in range(6, cached.shape[1]):
        with torch.no_grad():
            assert (model(cached[:, :end], use_cache=False).logits[:, -1].argmax(-1) == cached[:, end]).all()
    model.save_pretrained(tmp_path)
    again = HyperMLPForCausalLM.from_pretrained(tmp_path)
    assert again.config.canon == "ABCD"
    assert_close(again(ids).logits, model(ids).logits, tolerance=1e-6)


def test_gradient_checkpointing():
    model, ids = make(), tokens()
    plain = logits_and_gradients(model, lambda: model(ids, use_cache=False).logits)
    model.train()
    model.gradient_checkpointing_enable()
    again = logits_and_gradients(model, lambda: model(ids, use_cache=False).logits)
    for mine, expected in zip(again, plain, strict=True):
        assert_close(mine, expected, tolerance=1e-10)


@pytest.mark.parametrize("block", ["gpt2", "llama"])
@pytest.mark.parametrize("canon", PLACEMENTS)
def test_costs(canon, block):
    model, plain = make(canon, block=block), make("", block=block)
    assert model_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())
    added = model_parameters(model.config) - model_parameters(plain.config)
    difference = [forward_flops_per_token(each.config, 16) for each in (model, plain)]
    assert difference[0] - difference[1] == 2 * added  # each tap is one multiply-add at every position
    assert model_state_bytes(model.config, 16) > model_state_bytes(plain.config, 16)
    assert "canon" in "".join(part for part, count in model_parameter_table(model.config).items() if count)


def test_a_new_model_has_the_initial_values_of_a_convolution():
    config = HyperMLPConfig(mixer="S-p", canon="ABCD", hidden_size=64, num_hidden_layers=1, vocab_size=50)
    model = HyperMLPForCausalLM(config)
    weights = [model.model.layers[0].canon["A"].weight, model.model.layers[0].mixer.canon.weight]
    for weight in weights:
        assert 0.4 < weight.abs().max() <= 0.5
        assert abs(weight.mean()) < 0.1


def test_equal_parameters_with_canon_layers():
    recipe = load_recipe(
        "cpu-mini", ["model.mixer=S-p", "model.canon=ABCD", "model.match_parameters=G-cg-q-12o"]
    )
    ours = load_recipe("cpu-mini").model_config(257)
    found = model_parameters(recipe.model_config(257))
    assert abs(found / model_parameters(ours) - 1) < 0.005


@pytest.mark.parametrize("canon", ["BA", "AA", "E", "abcd"])
def test_wrong_places_are_refused(canon):
    with pytest.raises(ValueError, match=f"canon is '{canon}'; it must be letters of {''.join(PLACES)}"):
        make(canon)


def test_registers_are_refused():
    with pytest.raises(ValueError, match="registers are not part of the sequence"):
        make("B", num_registers=2)
