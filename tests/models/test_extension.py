"""Another context for an existing model: exact on the lengths that both contexts have."""

import math

import pytest
import torch
from transformers import DynamicCache

from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.testing import assert_close

from .conftest import LABELS, build

OLD, NEW = 17, 29
SETTINGS = {
    **{label: {"mixer": label} for label in LABELS},
    "forward layout": {"mixer": "G-cg-q-12"},
    "registers": {"num_registers": 3},
    "learned positions": {"learned_positions": True},
    "a hybrid": {"mixer": ["G-cg-q-12o", "gla"]},
    "canon": {"canon": "ABCD"},
}


@pytest.mark.parametrize("method", ["zero", "mean", "repeat", "log-lag"])
@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_old_lengths_stay_exact_and_longer_ones_are_finite(name, method, ids, tmp_path):
    model = build(**({"max_position_embeddings": OLD} | SETTINGS[name]))
    before = model(ids).logits
    assert model.extend_context(NEW, method=method) is model
    assert model.config.max_position_embeddings == NEW
    configs = [model.config.mixer_config(index) for index in range(2)]
    assert [mixer.config for mixer in model.model.mixers()] == configs
    assert_close(model(ids).logits, before, tolerance=1e-12)
    longer = torch.cat([ids, ids], dim=1)[:, :NEW]
    after = model(longer).logits
    assert torch.isfinite(after).all()
    model.save_pretrained(tmp_path)
    loaded = HyperMLPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_close(loaded(longer).logits, after, tolerance=1e-12)
    assert_close(model.extend_context(OLD)(ids).logits, before, tolerance=1e-12)
    shrunk = model.extend_context(9).extend_context(NEW)(ids[:, :9]).logits
    assert_close(shrunk, before[:, :9], tolerance=1e-12)


def test_what_added_slots_hold():
    for method, expected in (
        ("zero", lambda rows, slot: 0 * rows[:, 0]),
        ("mean", lambda rows, slot: rows.mean(1)),
        ("repeat", lambda rows, slot: rows[:, 8 + (slot - 17) % 9]),
    ):
        layer = build(max_position_embeddings=17).extend_context(40, method=method).model.mixers()[0]
        for rows in (layer.mix1.diag, layer.mix1.left, layer.mix2.right):
            for slot in (17, 26, 39):
                assert_close(rows[:, slot], expected(rows[:, :17], slot), tolerance=1e-12)
    layer = build(max_position_embeddings=17).extend_context(33, method="log-lag").model.mixers()[0]
    place = 8 + 8 * math.log(20 / 17) / math.log(33 / 17)  # slot 20, in the far half 8 to 16
    low, share = int(place), place - int(place)
    expected = (1 - share) * layer.mix1.diag[:, low] + share * layer.mix1.diag[:, low + 1]
    assert_close(layer.mix1.diag[:, 20], expected, tolerance=1e-12)
    layer = build(max_position_embeddings=64).extend_context(80, method="mean").model.mixers()[0]
    assert_close(layer.mix1.diag[:, 70], layer.mix1.diag[:, 32:64].mean(1), tolerance=1e-12)


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
@torch.no_grad()
def test_rotary_frequencies_are_scaled_with_the_context(kind, ids, tmp_path):
    """The factor is the new context over the trained one, also in two steps, and is saved with the model."""
    model = build("S-p", max_position_embeddings=OLD)
    before = model(ids).logits
    model.extend_context(2 * OLD, rope_type=kind).extend_context(4 * OLD, rope_type=kind)
    assert (model.config.rope_type, model.config.rope_factor) == (kind, 4)
    assert model.config.rope_original_length == (OLD if kind == "yarn" else None)
    once = build("S-p", max_position_embeddings=OLD).extend_context(4 * OLD, rope_type=kind)
    longer = torch.cat([ids, ids], dim=1)
    after = model(longer).logits
    assert (after[:, :OLD] - before).abs().max() > 1e-3
    assert_close(once(longer).logits, after, tolerance=1e-12)
    model.save_pretrained(tmp_path)
    loaded = HyperMLPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_close(loaded(longer).logits, after, tolerance=1e-12)
    sequence = model.generate(ids, max_new_tokens=2 * OLD, do_sample=False, pad_token_id=0)
    assert torch.equal(model(sequence).logits.argmax(-1)[:, OLD - 1 : -1], sequence[:, OLD:])


def test_states_from_before_are_refused(ids):
    model = build(max_position_embeddings=OLD + 1)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        model.extend_context(NEW)
        with pytest.raises(UserError, match="another configuration or context"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_states_of_optimizers_from_before_are_refused(ids, settings):
    model = build(max_position_embeddings=OLD)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)

    def step(optimizer):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    step(optimizer)
    model.extend_context(NEW)
    with pytest.raises(UserError, match="make a new optimizer"):
        step(optimizer)
    fresh = torch.optim.AdamW(model.parameters(), **settings)
    step(fresh)
    step(fresh)
    assert fresh.state[model.model.mixers()[0].mix1.diag]["exp_avg"].shape[1] == NEW


@pytest.mark.parametrize(
    ("n", "settings", "message"),
    [
        (0, {}, "n is 0; it must be a positive integer"),
        (True, {}, "n is True"),
        (3.5, {}, "n is 3.5"),
        (20, {"method": "linear"}, "unknown method 'linear'; allowed: zero, mean, repeat, log-lag"),
        (20, {"rope_type": "linear"}, "rope_type is 'linear'; it must be 'ntk' or 'yarn', or left out"),
        (20, {"rope_type": "ntk"}, "left out for 'G-cg-q-12o', which has no rotary label"),
    ],
)
def test_bad_input_changes_nothing(n, settings, message):
    model = build(max_position_embeddings=OLD)
    with pytest.raises(UserError, match=message):
        model.extend_context(n, **settings)
    assert model.config.max_position_embeddings == OLD
    assert model.model.mixers()[0].mix1.diag.shape[1] == OLD


def test_scaling_needs_a_longer_context():
    with pytest.raises(UserError, match="n is 16; it must be at least the present context of 17"):
        build("S-p", max_position_embeddings=OLD).extend_context(16, rope_type="ntk")
    with pytest.raises(ValueError, match="rope_type is 'ntk'; it must be left out in a model without rotary"):
        build(rope_type="ntk", rope_factor=2.0)


def test_the_command_reports_mistakes(tmp_path, capsys):
    assert main(["extend", str(tmp_path), "--context", "0", "--out", str(tmp_path / "new")]) == 2
    assert "--context is 0; it must be at least 1" in capsys.readouterr().err
    assert main(["extend", str(tmp_path), "--context", "8", "--out", str(tmp_path)]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
