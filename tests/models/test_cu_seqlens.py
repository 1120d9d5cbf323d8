"""Packed sequences by their cumulative lengths: each is what it is alone."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from hypermlp.errors import UserError
from hypermlp.layers import build_mixer
from hypermlp.ops import hyper_attention
from hypermlp.testing import assert_close, op_inputs, randomise_

from .conftest import LABELS, build

LENGTHS = (5, 1, 9, 2)
CU = torch.tensor([0, 5, 6, 15, 17], dtype=torch.int32)


def grads_of(out, tensors):
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True)


def test_the_operator():
    inputs = op_inputs(batch=1, queries=17).requires_grad()
    starts = torch.repeat_interleave(CU[:-1].long(), torch.tensor(LENGTHS))[None]
    out = hyper_attention(*inputs, cu_seqlens=CU)
    expected = hyper_attention(*inputs, starts=starts, backend="reference")
    assert_close(out, expected, tolerance=1e-10)
    last = [inputs.q[:, -4:], inputs.k, inputs.v]
    mixes = [mix._replace(gate=mix.gate[:, -4:]) for mix in (inputs.mix1, inputs.mix2)]
    assert_close(hyper_attention(*last, *mixes, cu_seqlens=CU), expected[:, -4:], tolerance=1e-10)
    for mine, other in zip(
        grads_of(out, inputs.tensors()), grads_of(expected, inputs.tensors()), strict=True
    ):
        assert_close(mine, other, tolerance=1e-10)


@pytest.mark.parametrize("name", [*LABELS, "softmax", "gla"])
def test_a_layer_sees_each_sequence_alone(name):
    layer = randomise_(build_mixer(name, hidden_size=16, max_length=9)).double()
    x = torch.randn(1, 17, 16, dtype=torch.float64, requires_grad=True)
    tensors = [x, *layer.parameters()]
    packed = layer(x, cu_seqlens=CU)
    alone = torch.cat([layer(part) for part in x.split(LENGTHS, dim=1)], dim=1)
    assert_close(packed, alone, tolerance=1e-10)
    for mine, other in zip(grads_of(packed, tensors), grads_of(alone, tensors), strict=True):
        assert_close(mine, other, tolerance=1e-10, floor=1e-3)


@pytest.mark.parametrize("settings", [{"mixer": label} for label in LABELS] + [{"canon": "ABCD"}], ids=str)
def test_a_model_with_the_collator_of_transformers(settings):
    model = build(max_position_embeddings=9, **settings)
    texts = [torch.randint(1, 61, (n,)).tolist() for n in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate([{"input_ids": text} for text in texts]))
    assert batch["cu_seq_lens_q"].tolist() == CU.tolist()
    out = model(**batch)
    alone = torch.cat([model(torch.tensor([text])).logits for text in texts], dim=1)
    assert_close(out.logits, alone, tolerance=1e-10)
    expected = torch.nn.functional.cross_entropy(alone[0, :-1].float(), batch["labels"][0, 1:])
    assert_close(out.loss, expected, tolerance=1e-6)  # transformers computes it in float32
    parameters = list(model.parameters())
    for mine, other in zip(grads_of(out.logits, parameters), grads_of(alone, parameters), strict=True):
        assert_close(mine, other, tolerance=1e-10, floor=1e-3)
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[
        None
    ]  # as TRL's collator passes
    assert_close(model(**batch, seq_idx=numbers).logits, alone, tolerance=1e-10)
    assert_close(model(batch["input_ids"], seq_idx=numbers).logits, alone, tolerance=1e-10)
    del batch["position_ids"]
    assert_close(model(**batch).logits, alone, tolerance=1e-10)
    assert_close(model(batch["input_ids"], cu_seqlens=CU).logits, alone, tolerance=1e-10)


WRONG = [
    (torch.tensor([0, 9, 5, 17]), r"decreases: got 5 at index \(2,\)"),
    (torch.tensor([0, 5, 16]), "another number of positions than the 17 that are given: got 16"),
    (torch.tensor([1, 5, 17]), "begins with another number than 0: got 1"),
    (torch.tensor([0.0, 17.0]), "cu_seqlens is torch.float32"),
    (torch.tensor([[0, 17]]), r"cu_seqlens has shape \[1, 2\]"),
    (torch.tensor([17]), r"cu_seqlens has shape \[1\]"),
    ([0, 17], "cu_seqlens is a list"),
]


def parts():
    """Return the operator's inputs, a layer and a model."""
    return op_inputs(batch=1, queries=17), build_mixer("S-p", hidden_size=16, max_length=17), build()


@pytest.mark.parametrize(("lengths", "message"), WRONG, ids=str)
def test_bad_lengths_are_refused_before_any_work(lengths, message, ids):
    inputs, layer, model = parts()
    with pytest.raises(UserError, match=message):
        hyper_attention(*inputs, cu_seqlens=lengths)
    state = layer.new_state(1)
    with torch.no_grad(), pytest.raises(UserError, match=message):
        layer(torch.randn(1, 17, 16), cu_seqlens=lengths, state=state)
    assert state.length == 0
    with pytest.raises(UserError, match=message):
        model(ids[:1], cu_seq_lens_q=lengths)


def test_contradictions_are_refused(ids):
    inputs, layer, model = parts()
    with pytest.raises(UserError, match="both given"):
        hyper_attention(*inputs, cu_seqlens=CU, starts=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="the batch size is 3"):
        model(ids, cu_seqlens=CU)
    state = layer.new_state(1)
    with torch.no_grad():
        layer(torch.randn(1, 3, 16), state=state)
        with pytest.raises(UserError, match="with a state that holds 3 positions"):
            layer(torch.randn(1, 17, 16), cu_seqlens=CU, state=state)
    with pytest.raises(UserError, match="both given"):
        layer(torch.randn(1, 17, 16), cu_seqlens=CU, starts=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match="both given"):
        model(ids[:1], cu_seqlens=CU, document_ids=torch.zeros(1, 17))
    with pytest.raises(UserError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(ids[:1], cu_seq_lens_q=CU, cu_seq_lens_k=torch.tensor([0, 17]))
    with pytest.raises(UserError, match="seq_idx and cu_seq_lens_q differ"):
        model(ids[:1], cu_seq_lens_q=CU, seq_idx=torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(UserError, match=r"seq_idx has shape \[17\]; it must be \[1, 17\]"):
        model(ids[:1], seq_idx=torch.zeros(17))
    with pytest.raises(UserError, match="longer than max_length_q = 8: got 9"):
        model(ids[:1], cu_seq_lens_q=CU, max_length_q=8)
    with pytest.raises(UserError, match="max_length_q without cu_seq_lens_q"):
        model(ids[:1], max_length_q=8)
    filled = model(ids[:1], use_cache=True).past_key_values
    with pytest.raises(UserError, match="with a filled cache"):
        model(ids[:1], cu_seqlens=CU, past_key_values=filled)
