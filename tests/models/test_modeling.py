"""The model keeps the layers' contract: caching, padding and packing change nothing."""

import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hypermlp.errors import UserError
from hypermlp.testing import assert_close

from .conftest import LABELS, build

TIGHT = 1e-9


def test_packed_and_padded(ids):
    model = build()
    lengths = [3, 6, 8]  # padding, two documents
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    mask = (documents > 0).long()
    alone = torch.cat([model(chunk).logits for chunk in ids[:1, 3:].split(lengths[1:], dim=1)], dim=1)
    assert_close(
        model(ids[:1], attention_mask=mask, document_ids=documents).logits[:, 3:], alone, tolerance=TIGHT
    )


def test_what_cannot_be_masked_is_refused(ids):
    model = build()
    hole = torch.ones_like(ids)
    hole[1, 4] = 0
    cases = [
        ({"attention_mask": hole}, "zeros between ones"),
        ({"attention_mask": hole[:, :5]}, r"attention_mask has shape \[3, 5\]; it must be \[3, 17\]"),
        ({"attention_mask": hole[:, None, None]}, r"must be a tensor \[batch, positions\]"),
        ({"attention_mask": hole.tolist()}, "attention_mask has type list; it must be a tensor"),
        ({"attention_mask": 1 + hole}, r"a value other than 0 and 1: got 2 at index \(0, 0\).*document_ids"),
        ({"attention_mask": hole * torch.nan}, "a value other than 0 and 1: got nan"),
        ({"document_ids": ids[:, :4]}, r"document_ids has shape \[3, 4\]"),
        ({"past_key_values": DynamicCache(), "use_cache": True}, r"DynamicCache\(config=model.config\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            model(ids, **arguments)


def test_text_in_the_place_of_ids_and_labels_of_another_shape_are_refused(ids):
    model = build("R-cg-q-12o")
    for call in (model, model.generate):
        with pytest.raises(UserError, match="str; it .* a tensor of token ids, such as tokenizer"):
            call("import ")
    for wrong in (ids[0], ids.float()):
        with pytest.raises(UserError, match=r"input_ids has shape .* it must be integers \[batch, tokens\]"):
            model(wrong)
    with pytest.raises(UserError, match=r"labels has shape \[3, 5\]; it must be \[3, 17\]"):
        model(ids, labels=ids[:, :5])


@pytest.mark.parametrize("wrong", [64, 1000, -1])
def test_a_token_id_beyond_the_vocabulary_is_named(wrong, ids):
    model = build("R-cg-q-12o", vocab_size=64)
    message = f"token id {wrong}; ids must be 0 or more and below the size of the vocabulary, 64"
    with pytest.raises(UserError, match=message):
        model(torch.full_like(ids, wrong))


@pytest.mark.parametrize("wrong", [64, -1])
@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_label_beyond_the_vocabulary_is_named(wrong, skip_logits, ids):
    model = build("R-cg-q-12o", vocab_size=64)
    ids = ids % 64
    labels = ids.clone()
    labels[1, 3] = wrong
    message = rf"no token id: got {wrong} at index \(1, 3\); allowed: 0 or more and below .* 64, or -100"
    with pytest.raises(UserError, match=message):
        model(ids, labels=labels, skip_logits=skip_logits)
    labels[1, 3] = -100
    assert model(ids, labels=labels, skip_logits=skip_logits).loss.isfinite()


def test_more_tokens_than_the_context_are_refused_in_the_models_words():
    model, long = build(), torch.zeros(2, 65, dtype=torch.long)
    message = r"65 tokens in a row, but the model's context is 64 \(max_position_embeddings\)"
    mask = torch.ones_like(long)
    for arguments in ({}, {"attention_mask": mask}, {"document_ids": long}):
        with pytest.raises(UserError, match=message) as raised:
            model(long, **arguments)
        assert "starts" not in str(raised.value)
    mask[:, 0] = 0
    assert model(long, attention_mask=mask).logits.shape == (2, 65, 61)
    cache = DynamicCache(config=model.config)
    model(long[:, :64], past_key_values=cache)
    with pytest.raises(UserError, match=message):
        model(long[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"attentionmask": 1},
            "no argument 'attentionmask' \\(did you mean 'attention_mask'\\?\\); allowed: inp",
        ),
        ({"lables": 1}, "no argument 'lables' \\(did you mean 'labels'\\?\\)"),
        ({"starts": 1}, "no argument 'starts'; allowed: input_ids, attention_mask"),
        ({"output_attentions": True}, "the model has no attention maps"),
    ],
)
def test_unknown_arguments_are_refused(ids, arguments, message):
    model = build()
    for part in (model, model.model):
        with pytest.raises(UserError, match=message if part is model else "the model has no"):
            part(ids, **arguments)


def test_what_transformers_passes_is_accepted(ids):
    model = build()
    passed = {"output_attentions": None, "num_items_in_batch": 3, "return_dict": True, "starts": None}
    assert model(ids, labels=ids, shift_labels=ids, **passed).loss.isfinite()


def test_a_cache_layer_shows_keys_and_values_as_transformers_does(ids):
    model = build(["G-cg-q-12o", "gla"], hidden_size=32)
    cache = model(ids).past_key_values
    assert cache.layers[0].keys.shape == (3, 4, 17, 2)  # two branches for each of two heads
    assert cache.layers[0].values.shape == (3, 2, 17, 16)
    assert cache.layers[0].is_initialized
    assert cache.layers[1].keys is None
    static = StaticCache(config=build().config, max_cache_len=20)
    with torch.no_grad():
        build()(ids, past_key_values=static)
    assert static.layers[0].keys.shape == (3, 4, 20, 2)


def test_the_loss_is_the_mean_over_next_tokens_or_over_a_given_number(ids):
    model = build()
    logits = model(ids).logits
    labels = ids.clone()
    labels[0, :9] = -100
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
    )
    count = int((labels[:, 1:] != -100).sum())
    assert_close(model(ids, labels=labels).loss, each / count, tolerance=1e-6)
    assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, each / 100, tolerance=1e-6)
    assert model(ids, logits_to_keep=1).logits.shape == (3, 1, 61)


def test_gradient_checkpointing_gives_the_same_gradients(ids):
    model = build(vocab_size=61).train()
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert model.is_gradient_checkpointing
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("label", LABELS)
def test_bfloat16(label, ids):
    model = build(label, dtype=torch.float32)
    exact = model(ids).logits
    half = model.to(torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16
    assert_close(half(ids).logits.float(), exact, tolerance=0.1)


def test_hidden_states(ids):
    out = build()(ids, output_hidden_states=True)
    assert [h.shape for h in out.hidden_states] == [(3, 17, 32)] * 3


@pytest.mark.thorough
def test_a_saved_folder_finds_the_package_by_itself_or_says_what_to_install(tmp_path):
    build(dtype=torch.float32).save_pretrained(tmp_path)
    load = (
        "from transformers import AutoModelForCausalLM as Auto; "
        f"print(type(Auto.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)))"
    )
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for hide, expected in (
        ("", "HyperMLPForCausalLM"),
        ("import sys; sys.modules['hypermlp'] = None; ", "pip install 'hypermlp[train]'"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", hide + load], capture_output=True, text=True, env=environment
        )
        assert expected in done.stdout + done.stderr


@pytest.mark.thorough
def test_compiles_whole(ids, compiler):
    model = build()
    compiled = compiler(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, tolerance=TIGHT)


def test_initialisation_scales_residual_outputs_with_depth():
    for block, expected in (("gpt2", 0.02 / 8**0.5), ("llama", 0.02)):
        from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

        model = HyperMLPForCausalLM(
            HyperMLPConfig(hidden_size=128, num_hidden_layers=4, vocab_size=100, block=block)
        )
        for layer in model.model.layers:
            for weight in (layer.mixer.o_proj.weight, layer.mlp.down_proj.weight):
                assert weight.std().item() == pytest.approx(expected, rel=0.05)
            assert layer.mixer.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert not layer.mixer.gates.bias.any()
            assert not layer.mixer.mix1.diag.any()
            assert layer.mixer.mix1.left.std().item() == pytest.approx(0.02, rel=0.1)
