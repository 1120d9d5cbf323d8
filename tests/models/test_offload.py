"""Weights that accelerate keeps elsewhere: the layers work with what its hooks bring."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from .conftest import build

pytestmark = pytest.mark.thorough


def assert_same_tokens(model, other, ids):
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert torch.equal(other.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("mixer", ["G-cg-q-12o", "gla"])
def test_weights_are_offloaded_to_memory(mixer, ids):
    model, other = build(mixer), build(mixer)
    cpu_offload(other, execution_device="cpu")
    assert other.model.layers[0].mixer.o_proj.weight.is_meta
    assert_same_tokens(model, other, ids)


def test_weights_are_offloaded_to_a_disk(ids, tmp_path):
    model = build(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "lm_head"), "cpu")
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=places | {"model.layers.1": "disk"},
        offload_folder=str(tmp_path / "offloaded"),
    )
    assert other.model.layers[1].mixer.o_proj.weight.is_meta
    assert_same_tokens(model, other, ids)
