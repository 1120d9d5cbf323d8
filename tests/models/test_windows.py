"""Sliding windows of a model: ``generate`` has no end, and equals full forward passes token by token."""

import pytest
import torch

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.testing import assert_close

from .conftest import build

CONTEXT, WINDOW = 64, 16
MODELS = {
    "HyperGLU": {"mixer": "G-cg-q-12o"},
    "HyperMLP": {"mixer": "R-cg-q-12o"},
    "S-p": {"mixer": "S-p"},
    "a full softmax layer": {"mixer": ["G-cg-q-12o", "softmax"], "sliding_window": [WINDOW, None]},
    "a recurrence": {"mixer": ["gla", "S-p"], "sliding_window": [None, WINDOW]},
    "two windows": {"sliding_window": [5, 30]},
    "canon": {"canon": "ABCD"},
    "registers": {"num_registers": 2},
}


def windowed(name, **settings):
    given = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW} | MODELS[name] | settings
    return build(**given)


def generate(model, ids, count, **settings):
    return model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **settings)


def assert_greedy(model, sequence, given):
    """Raise unless a full forward pass over the sequence would choose each of its tokens after ``given``."""
    with torch.no_grad():
        chosen = model(sequence).logits.argmax(-1)
    assert torch.equal(chosen[:, given - 1 : -1], sequence[:, given:])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["HyperGLU", "HyperMLP", "S-p", "a full softmax layer", "a recurrence"])
def test_generating_four_contexts_equals_full_forward_passes(name, ids, recwarn):
    model = windowed(name)
    sequence = generate(model, ids[:2], 4 * CONTEXT)
    assert sequence.shape[1] == 17 + 4 * CONTEXT
    assert len(sequence.unique()) > 10
    assert_greedy(model, sequence, 17)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["canon", "registers", "two windows"])
def test_other_models_go_past_the_context(name, ids):
    model = windowed(name, max_position_embeddings=32)
    assert_greedy(model, generate(model, ids[:2], 40), 17)


def test_a_hybrid_with_full_labels_ends_at_the_context_and_is_exact(ids, caplog):
    model = windowed("HyperGLU", sliding_window=[WINDOW, None])
    sequence = generate(model, ids, 4 * CONTEXT)
    assert sequence.shape[1] == CONTEXT
    assert_greedy(model, sequence, 17)


def test_a_window_is_saved_and_can_be_given_to_a_model_without_one(ids, tmp_path):
    model = build(max_position_embeddings=CONTEXT)
    model.save_pretrained(tmp_path)
    settings = {"sliding_window": [WINDOW, None], "dtype": torch.float64}
    loaded = HyperMLPForCausalLM.from_pretrained(tmp_path, **settings).eval()
    assert [mixer.window for mixer in loaded.model.mixers()] == [WINDOW, None]
    with torch.no_grad():
        assert_close(loaded(ids[:, :WINDOW]).logits, model(ids[:, :WINDOW]).logits, tolerance=1e-12)
    loaded.save_pretrained(tmp_path / "again")
    again = HyperMLPConfig.from_pretrained(tmp_path / "again")
    assert again.windows == [WINDOW, None]


def test_a_window_and_a_longer_context(ids):
    model = windowed("HyperGLU")
    with torch.no_grad():
        before = model(ids).logits
        assert_close(model.extend_context(2 * CONTEXT)(ids).logits, before, tolerance=1e-12)
        assert_close(model.extend_context(WINDOW)(ids).logits, before, tolerance=1e-12)
    with pytest.raises(UserError, match="n is 15, a context shorter than the sliding window of 16"):
        model.extend_context(WINDOW - 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sliding_window": 0},
            "sliding_window is 0; it must be a positive integer, at most the context of 64",
        ),
        (
            {"sliding_window": 65},
            "sliding_window is 65; it must be a positive integer, at most the context of 64",
        ),
        (
            {"sliding_window": [4]},
            r"sliding_window is \[4\]; it must be one value, or a list with one for each",
        ),
        ({"sliding_window": [4, 0]}, "sliding_window is 0"),
        (
            {"mixer": ["G-cg-q-12o", "gla"], "sliding_window": 4},
            "sliding_window of layer 1 is 4; it must be None for 'gla', which has no window; give a list",
        ),
        ({"mixer": "softmax-naive", "sliding_window": 4}, "None for 'softmax-naive', which has no window"),
    ],
)
def test_bad_windows_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        HyperMLPConfig(
            hidden_size=32, num_hidden_layers=2, max_position_embeddings=64, vocab_size=61, **settings
        )


def test_learned_positions_end_with_the_context(ids):
    model = windowed("HyperGLU", learned_positions=True, max_position_embeddings=32)
    assert not model.is_endless
    assert generate(model, ids, 40).shape[1] == 32
