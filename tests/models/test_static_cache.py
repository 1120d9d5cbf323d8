"""A static cache: ``generate`` gives the same tokens, and a compiled step serves every position."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from hypermlp.testing import assert_close

from .conftest import LABELS, build
from .test_generate import generate

STATIC = {"cache_implementation": "static"}


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :8], mask[2, :13] = 0, 0
    return ids * mask, mask


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("label", LABELS)
def test_a_left_padded_batch(label, beams, ids):
    model = build(label)
    ids, mask = padded(ids)
    static = generate(model, ids, attention_mask=mask, num_beams=beams, **STATIC)
    assert torch.equal(static, generate(model, ids, attention_mask=mask, num_beams=beams))


@pytest.mark.parametrize("windows", [None, [12, None], [None, 12]], ids=str)
@pytest.mark.parametrize("mixers", [["R-cg-q-12o", "S-p"], ["S-p", "R-cg-q-12o"]], ids=str)
@torch.no_grad()
def test_layers_with_and_without_rotary_positions(mixers, windows, ids):
    """Rotary layers count from the beginning of the document, also behind a layer that does not need it."""
    model = build(mixers, sliding_window=windows)
    ids, mask = padded(ids)
    cache, first = StaticCache(config=model.config, max_cache_len=ids.shape[1]), 14
    model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache)
    steps = [
        model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits
        for i in range(first, ids.shape[1])
    ]
    whole = model(ids, attention_mask=mask).logits[:, first:]
    assert_close(torch.cat(steps, dim=1), whole, tolerance=1e-10)


@pytest.mark.parametrize("settings", [{"prefill_chunk_size": 5}, {"max_cache_len": 60}], ids=str)
def test_chunked_prefill_and_a_larger_cache(settings, ids):
    model = build()
    ids, mask = padded(ids)
    static = generate(model, ids, attention_mask=mask, **STATIC, **settings)
    assert torch.equal(static, generate(model, ids, attention_mask=mask))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.thorough
def test_100_tokens_take_one_compilation(label, learned, compiler):
    model = build(label, max_position_embeddings=120, learned_positions=learned)
    ids, mask = padded(torch.randint(0, 61, (3, 120)))
    counter = CompileCounterWithBackend("aot_eager")
    step = compiler(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        cache = StaticCache(config=model.config, max_cache_len=120)
        outs = [model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache).logits]
        outs += [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 120)]
    assert counter.frame_count == 1
    assert_close(torch.cat(outs, dim=1)[mask == 1], expected[mask == 1], tolerance=1e-10)
    assert cache.get_seq_length() == 120


@pytest.mark.thorough
def test_generate_compiles_once(ids, compiler):
    """Greedy with padding: the mask that grows with the tokens is not passed on."""
    model = build(max_position_embeddings=120, num_hidden_layers=1)
    ids, mask = padded(ids)
    config = CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    config._compile_all_devices = True
    counters.clear()
    for rows in (ids, ids.flip(1)):
        settings = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
        static = model.generate(rows, compile_config=config, **STATIC, **settings)
        assert torch.equal(static, model.generate(rows, **settings))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_cache_is_used_again_after_a_reset(ids):
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            model(ids[:, :9], past_key_values=cache)
            addresses = [layer.state.keys.data_ptr() for layer in cache.layers]
            rest = model(ids[:, 9:], past_key_values=cache).logits
            assert_close(rest, expected[:, 9:], tolerance=1e-10)
            cache.reset()
            assert cache.get_seq_length() == 0
            assert addresses == [layer.state.keys.data_ptr() for layer in cache.layers]


def test_tokens_are_taken_back(ids):
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        model(ids.flip(1)[:, :3], past_key_values=cache)
        cache.crop(-3)
        rest = model(ids[:, 9:], past_key_values=cache).logits
        assert_close(rest, model(ids).logits[:, 9:], tolerance=1e-10)


def test_a_mixer_without_a_state_of_fixed_size(ids):
    with pytest.raises(ValueError, match="no decoding state of fixed size"):
        generate(build("linear"), ids, **STATIC)


def test_no_step_waits_for_the_device():
    """Meta tensors have no values: whatever asks for one raises."""
    with torch.device("meta"):
        model = build()
    cache = StaticCache(config=model.config, max_cache_len=40)
    ids, mask = torch.zeros(3, 9, dtype=torch.int64, device="meta"), torch.ones(3, 9, device="meta")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, past_key_values=cache, attention_mask=mask
        )
        assert inputs.get("attention_mask") is None
        assert model(**inputs).logits.shape == (3, 1, 61)
