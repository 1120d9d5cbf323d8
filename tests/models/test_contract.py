"""The layers' contract in models: a cache, padding, packing and saving change no output and no gradient."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hypermlp.layers import BASELINES
from hypermlp.testing import assert_close

from .conftest import LABELS, build

SHORT = {"max_position_embeddings": 12}  # a context shorter than the input, for models with windows
MODELS = {
    **{label: {"mixer": label} for label in LABELS},
    "hybrid": {"mixer": ["G-cg-q-12o", "S-p"], "block": "llama"},
    "learned positions": {"mixer": "S", "learned_positions": True},
    "untied": {"mixer": "R-12!", "block": "llama", "tie_word_embeddings": False},
    "registers": {"num_registers": 2},
    **{f"canon {places}": {"mixer": "S-p", "canon": places} for places in ("A", "B", "C", "D", "ABCD")},
    "canon in a llama": {"mixer": ["R-12o!", "S-pc"], "canon": "ABCD", "block": "llama"},
    "canon of HyperGLU": {"canon": "ABCD"},
    "canon of gla": {"mixer": "gla", "canon": "ACD"},
    "canon of fox": {"mixer": "fox", "canon": "ACD"},
    **{f"window of {label}": {"mixer": label, "sliding_window": 5} | SHORT for label in LABELS},
    "two windows": {"sliding_window": [3, 8]} | SHORT,
    "window and softmax": {"mixer": ["G-cg-q-12o", "softmax"], "sliding_window": [5, None]},
    "window and a recurrence": {"mixer": ["gla", "S-p"], "sliding_window": [None, 5]} | SHORT,
    "window and canon": {"sliding_window": 5, "canon": "ABCD"} | SHORT,
    "window and registers": {"sliding_window": 5, "num_registers": 2} | SHORT,
}
MORE = [pytest.param({"mixer": name}, id=name, marks=pytest.mark.thorough) for name in BASELINES]
every_model = pytest.mark.parametrize(
    "settings", [*(pytest.param(settings, id=name) for name, settings in MODELS.items()), *MORE]
)


def gradients(model, out):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).sin().view(out.shape)
    return torch.autograd.grad((out * weights).sum(), list(model.parameters()), retain_graph=True)


def assert_same(model, out, expected):
    """Raise unless both outputs of a model and their gradients are the same."""
    assert_close(out, expected, tolerance=1e-10)
    if out.requires_grad:
        for mine, other in zip(gradients(model, out), gradients(model, expected), strict=True):
            assert_close(mine, other, tolerance=1e-10)


def in_chunks(model, ids, sizes, mask=None):
    cache, outs, last = DynamicCache(config=model.config), [], 0
    for chunk in ids.split(sizes, dim=1):
        last += chunk.shape[1]
        given = {} if mask is None else {"attention_mask": mask[:, :last]}
        outs.append(model(chunk, past_key_values=cache, use_cache=True, **given).logits)
    assert cache.get_seq_length() == last
    return torch.cat(outs, dim=1)


@every_model
@pytest.mark.parametrize("sizes", [[1] * 17, [5] + [1] * 12, [1, 7, 9], [16, 1], [2, 1, 5, 9]], ids=str)
def test_a_cache_changes_nothing(settings, sizes, ids):
    model = build(**settings)
    assert_same(model, in_chunks(model, ids, sizes), model(ids, use_cache=False).logits)
    with torch.no_grad():  # the state is then written in place
        assert_same(model, in_chunks(model, ids, sizes), model(ids).logits)


@every_model
def test_padding_on_either_side_changes_nothing(settings, ids):
    model = build(**settings)
    lengths, total = (17, 9, 4), 20
    alone = [model(ids[row : row + 1, :n]).logits for row, n in enumerate(lengths)]
    for left in (True, False):
        padded, mask = torch.full((3, total), 60), torch.zeros(3, total, dtype=torch.long)
        places = [slice(total - n, total) if left else slice(0, n) for n in lengths]
        for row, (place, n) in enumerate(zip(places, lengths, strict=True)):
            padded[row, place], mask[row, place] = ids[row, :n], 1
        together = [model(padded, attention_mask=mask).logits]
        if left:
            together.append(in_chunks(model, padded, [3, 3, 1, 1, 12], mask))
        for logits in together:
            rows = [logits[row : row + 1, place] for row, place in enumerate(places)]
            assert_same(model, torch.cat(rows, dim=1), torch.cat(alone, dim=1))


@every_model
def test_packed_documents_are_each_alone(settings, ids):
    model, row, lengths = build(**settings), ids[:1], [2, 1, 8, 6]
    alone = torch.cat([model(part).logits for part in row.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    cumulative = torch.tensor([0, *itertools.accumulate(lengths)])
    for packed in (
        {"position_ids": positions},
        {"document_ids": documents},
        {"position_ids": positions, "document_ids": documents},
        {"cu_seqlens": cumulative},
    ):
        assert_same(model, model(row, use_cache=False, **packed).logits, alone)


@every_model
def test_saved_and_loaded_bit_for_bit(settings, ids, tmp_path):
    model = build(dtype=torch.float32, **settings)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == settings.get("tie_word_embeddings", True)
    assert torch.equal(again(ids).logits, model(ids).logits)
