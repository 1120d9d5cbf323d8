"""The configuration: defaults, errors before work, parameter counts."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hypermlp.layers import build_mixer
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM, configuration_hypermlp


def on_meta(**settings):
    with torch.device("meta"):
        return HyperMLPForCausalLM(HyperMLPConfig(**settings))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_a_round_trip_through_a_dictionary_and_auto_classes():
    config = HyperMLPConfig(
        mixer=["G-cg-q-12o", "S-p"],
        num_hidden_layers=2,
        hidden_size=64,
        block="llama",
        tie_word_embeddings=False,
    )
    again = AutoConfig.for_model(**config.to_dict())
    assert isinstance(again, HyperMLPConfig)
    assert again.to_dict() == config.to_dict()
    assert again.mixers == ["G-cg-q-12o", "S-p"]
    assert again.intermediate_size == 256
    assert isinstance(AutoModelForCausalLM.from_config(config), HyperMLPForCausalLM)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": "bert"}, "block is 'bert'; it must be 'gpt2' or 'llama'"),
        ({"mixer": ["S", "S-p"]}, "num_hidden_layers = 12"),
        ({"mixer": "Q-12"}, "unknown mixer 'Q-12'"),
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size|qk_width"),
        ({"rank": 0}, "rank is 0"),
        ({"intermediate_size": -1}, "intermediate_size is -1; it must be a positive integer"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0; it must be a positive finite number"),
        ({"norm_eps": float("nan")}, "norm_eps is nan; it must be a positive finite number"),
        (
            {"conv_kernel": 2**31},
            "conv_kernel is 2147483648; it must be .*, at most 268,435,456",
        ),
        ({"rank": 2**63}, "rank is 9223372036854775808; it must be a positive integer, at most 268,435,456"),
        ({"hidden_size": 2**62}, "hidden_size is .*; it must be a positive integer, at most 268,435,456"),
        (
            {"hiden_size": 64},
            "no field 'hiden_size' \\(did you mean 'hidden_size'\\?\\); allowed: .*",
        ),
        ({"starts": 4}, "no field 'starts'; allowed: baseline_settings"),
        ({"num_heads": 4, "num_attention_heads": 8}, "num_attention_heads is 8; it must be 4 or left out"),
    ],
)
def test_errors_before_work(settings, message):
    with pytest.raises(ValueError, match=message):
        HyperMLPConfig(**settings)


def test_nanogpt_has_nanogpts_parameters():
    # shared with the paper's protocol: 12 layers, width 768, context 1024, vocabulary 50,304, no biases, tied
    assert parameters(on_meta(mixer="S", learned_positions=True)) == 124_373_760
    assert parameters(on_meta(mixer="S")) == 123_587_328


@pytest.mark.parametrize(("hidden", "untied"), [(1024, 373_867_520), (2048, 1_364_297_728)])
def test_the_transformers_of_the_large_runs_without_tied_embeddings(hidden, untied):
    """tests/train/test_recipes.py has their counts with tied embeddings."""
    shape = {"mixer": "S-p", "block": "llama", "hidden_size": hidden, "num_hidden_layers": 24}
    shape |= {"vocab_size": 32_000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    assert parameters(on_meta(**shape)) == untied


def test_the_papers_names_are_labels():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    assert HyperMLPConfig(mixer="HyperGLU", **sizes).mixer == "G-cg-q-12o"
    assert HyperMLPConfig(mixer=["HyperMLP", "gla"], **sizes).mixer == ["R-cg-q-12o", "gla"]
    assert build_mixer("HyperMLP", hidden_size=32, max_length=8).config.activation == "relu"
    with pytest.raises(ValueError, match=r"unknown mixer 'HyperMLPs' \(did you mean"):
        HyperMLPConfig(mixer="HyperMLPs", **sizes)


def test_attention_heads_are_heads(tmp_path):
    config = HyperMLPConfig(hidden_size=64, num_attention_heads=8)
    assert (config.num_heads, config.num_attention_heads) == (8, 8)
    assert config.mixer_config(0).num_heads == 8
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).num_attention_heads == 8


def test_an_unknown_key_of_a_file_is_kept_with_a_warning(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(configuration_hypermlp.logger, "warning", warned.append)
    HyperMLPConfig(hidden_size=64).save_pretrained(tmp_path)
    HyperMLPConfig.from_pretrained(tmp_path)
    assert not warned
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"hiden_size": 32}))
    assert AutoConfig.from_pretrained(tmp_path).hiden_size == 32
    assert "does not read these keys of the file: hiden_size" in warned[0]
