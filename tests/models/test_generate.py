"""``generate`` in its usual modes: a cache, padding and other company in the batch change no token."""

import pytest
import torch

from hypermlp.errors import UserError

from .conftest import LABELS, build

pytestmark = pytest.mark.thorough

NEW = 12
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
}


WINDOW = {"sliding_window": 16, "max_position_embeddings": 32}
MODELS = {
    **{label: {"mixer": label} for label in LABELS},
    "window": WINDOW,
    "window of S-p": WINDOW | {"mixer": "S-p"},
    "window and softmax": WINDOW | {"mixer": ["G-cg-q-12o", "softmax"], "sliding_window": [16, None]},
}


def generate(model, ids, **settings):
    """Generate a few tokens; a model with windows goes past its context."""
    torch.manual_seed(5)
    count = 40 if any(model.config.windows) else NEW
    return model.generate(ids, max_new_tokens=count, pad_token_id=0, **({"do_sample": False} | settings))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", LABELS)
def test_with_and_without_a_cache(label, way, ids):
    model = build(label)
    without = generate(model, ids, use_cache=False, **WAYS[way])
    assert len(without.unique()) > 10  # nothing is proved by a model that repeats itself
    assert torch.equal(generate(model, ids, **WAYS[way]), without)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_left_padded_batch_equals_one_by_one(name, beams, ids):
    model = build(**MODELS[name])
    lengths = (17, 9, 4)
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        padded[row, 17 - n :], mask[row, 17 - n :] = ids[row, :n], 1
    together = generate(model, padded, attention_mask=mask, num_beams=beams)
    for row, n in enumerate(lengths):
        alone = generate(model, ids[row : row + 1, :n], num_beams=beams)
        assert torch.equal(together[row, 17:], alone[0, n:])


def right_padded(ids):
    padded, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, n in enumerate((17, 9, 4)):
        padded[row, :n], mask[row, :n] = ids[row, :n].clamp(min=1), 1
    return padded, mask


@pytest.mark.parametrize("way", [*WAYS, "without a mask", "embeddings", "static"])
def test_a_right_padded_batch_generates_what_a_left_padded_one_does(way, ids):
    model = build()
    padded, mask = right_padded(ids)
    order = mask.argsort(dim=1, stable=True)
    left, left_mask = padded.gather(1, order), mask.gather(1, order)
    settings = WAYS.get(way, {"cache_implementation": "static"} if way == "static" else {})
    expected = generate(model, left, attention_mask=left_mask, **settings)
    if way == "embeddings":
        embedded = model.get_input_embeddings()(padded)
        out = generate(model, None, inputs_embeds=embedded, attention_mask=mask)
        assert torch.equal(out, expected[:, 17:])
        return
    given = {} if way == "without a mask" else {"attention_mask": mask}
    out = generate(model, padded, **given, **settings)
    assert torch.equal(out[:, 17:], expected[:, 17:])
    assert torch.equal(out[:, :17], padded.repeat_interleave(out.shape[0] // 3, dim=0))


def test_a_right_padded_batch_goes_on_in_a_second_call(ids):
    model = build()
    padded, mask = right_padded(ids)
    expected = generate(model, padded, attention_mask=mask)
    first = model.generate(
        padded, attention_mask=mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    longer = torch.nn.functional.pad(mask, (0, 4), value=1)
    settings = {"past_key_values": first.past_key_values, "max_new_tokens": NEW - 4, "do_sample": False}
    assert torch.equal(model.generate(first.sequences, attention_mask=longer, **settings), expected)


def test_generation_from_embeddings_ends_at_the_context(ids):
    model = build()
    embedded = model.get_input_embeddings()(ids)
    out = model.generate(inputs_embeds=embedded, max_new_tokens=1000, do_sample=False, pad_token_id=0)
    assert out.shape[1] == model.config.max_position_embeddings - 17


@pytest.mark.parametrize("name", [*LABELS, "window", "window of S-p"])
@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_chunk_size": 5},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": {"num_hidden_layers": 1}},
    ],
    ids=str,
)
def test_other_ways_to_generate(name, settings, ids):
    """Assisted decoding, which takes one sequence, takes back what was guessed wrong."""
    model = build(**MODELS[name])
    expected = generate(model, ids)
    if "assistant_model" in settings:
        settings = {"assistant_model": build(MODELS[name].get("mixer", LABELS[0]), num_hidden_layers=1)}
    if "assistant_model" in settings or "prompt_lookup_num_tokens" in settings:
        ids, expected = ids[:1], expected[:1]
    assert torch.equal(generate(model, ids, **settings), expected)


def test_a_cache_goes_on_in_a_second_call(ids):
    model = build()
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    second = model.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=NEW - 4, do_sample=False
    )
    assert torch.equal(second, generate(model, ids))


def test_generation_ends_at_the_context(ids):
    model = build("G-cg-q-12o")
    context = model.config.max_position_embeddings
    out = model.generate(ids, max_new_tokens=10 * context, do_sample=False, pad_token_id=0)
    assert out.shape[1] == context
    with pytest.raises(UserError, match="the prompt has 65 tokens, but the model's context is 64"):
        model.generate(ids.repeat(1, 10)[:, : context + 1], max_new_tokens=5, pad_token_id=0)


def test_stop_strings_end_the_text():
    """``generate`` passes the tokenizer, which stop strings need, on to the model."""
    from hypermlp.train.tokenization import build_tokenizer

    tokenizer = build_tokenizer("bytes", iter(()))
    model = build(vocab_size=len(tokenizer))
    ids = tokenizer("a b", return_tensors="pt", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(generate(model, ids)[0, ids.shape[1] :])
    stopped = generate(model, ids, tokenizer=tokenizer, stop_strings=[text[0]])
    assert stopped.shape[1] == ids.shape[1] + 1
