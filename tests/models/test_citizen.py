"""What transformers expects of a causal language model, beyond the tests of its source archive.

tests/models/test_transformers_suite.py runs the common tests of transformers itself; here is what they leave
to their generation and export tests and the other files of this folder do not check.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hypermlp.models import HyperMLPForCausalLM
from hypermlp.testing import assert_close

from .conftest import build

NEW = 8


def generate(model, ids, **settings):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **settings)


def test_an_exported_model_computes_the_same_logits(ids):
    model = build(num_hidden_layers=1)
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"input_ids": {1: length}, "use_cache": None}
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)
    for count in (17, 5):
        expected = model(ids[:, :count], use_cache=False).logits
        actual = program.module()(input_ids=ids[:, :count], use_cache=False).logits
        assert_close(actual, expected, tolerance=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_in_both_forms(ids, reentrant):
    def gradients(model):
        model(ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(build().train())
    model = build().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for actual, wanted in zip(gradients(model), expected, strict=True):
        assert_close(actual, wanted, tolerance=1e-10, floor=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_generate_and_are_saved(ids, tied, tmp_path):
    model = build(tie_word_embeddings=tied)
    before = generate(model, ids)
    model.resize_token_embeddings(80)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 80
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with torch.no_grad():
        model.lm_head.weight[61:] = 0 if tied else -10  # the new tokens are not drawn below
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(generate(again, ids), generate(model, ids))
    assert generate(model, ids).shape == before.shape


def test_a_model_made_on_the_meta_device_is_loaded_and_initialised(ids):
    model = build()
    with torch.device("meta"):
        empty = HyperMLPForCausalLM(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu").double().load_state_dict(model.state_dict())
    assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


def test_sampling_with_a_seed_and_several_sequences(ids):
    model = build()
    settings = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    outputs = []
    for _ in range(2):
        torch.manual_seed(4)
        outputs.append(model.generate(ids, **settings))
    assert torch.equal(*outputs)
    assert outputs[0].shape == (9, 17 + NEW)


def test_embeddings_and_ids_give_the_same_text(ids):
    model = build()
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert torch.equal(embedded, generate(model, ids)[:, ids.shape[1] :])
