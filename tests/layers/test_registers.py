"""Registers are the oldest rows of every context, and the contract holds with them."""

import pytest
import torch

from hypermlp import HyperGLU, Mixer
from hypermlp.costs.mixer import forward_flops, parameter_count
from hypermlp.inspect import capture
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.testing import assert_close, randomise_
from tests.layers.test_contract import (
    HIDDEN,
    LABELS,
    LENGTH,
    TIGHT,
    assert_a_window_runs_past_max_length,
    assert_all_close,
    assert_packed_documents_are_separate,
    data,
    in_chunks,
    with_gradients,
)

COUNT = 3


def build(label, *, max_length=LENGTH, **settings):
    if "p" in label and label[0] == "G":
        settings.setdefault("qk_width", 16)
    settings = {"hidden_size": HIDDEN, "rank": 3, "num_registers": COUNT} | settings
    return randomise_(Mixer.from_label(label, max_length=max_length, **settings)).double()


def without_registers(layer):
    """The same weights in a layer that knows of no registers."""
    config = {name: getattr(layer.config, name) for name in layer.config.__dataclass_fields__}
    plain = Mixer(
        type(layer.config)(**config | {"max_length": layer.config.num_slots, "num_registers": 0})
    ).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "registers"})
    return plain


@pytest.fixture(params=LABELS)
def layer(request):
    return build(request.param)


def test_they_are_rows_before_the_input(layer):
    x, plain = data(), without_registers(layer)
    actual = dict(
        zip(
            ("out", "x", *(name for name, _ in layer.named_parameters())),
            with_gradients(layer, x, layer),
            strict=True,
        )
    )
    registers, x = layer.registers.detach().clone().requires_grad_(), x.requires_grad_()
    out = plain(torch.cat([registers.expand(2, -1, -1), x], dim=1))[:, COUNT:]
    wanted = {"x": x, "registers": registers, **dict(plain.named_parameters())}
    expected = {
        "out": out,
        **dict(zip(wanted, torch.autograd.grad(out, wanted.values(), data(seed=4)), strict=True)),
    }
    for name, value in expected.items():
        assert_close(actual[name], value, tolerance=TIGHT, what=name)


@pytest.mark.thorough
def test_prefill_then_decode_at_every_split(layer):
    x = data()
    full = with_gradients(layer, x, layer)
    for split in (1, 2, 3, 7):
        chunks = [split] + [1] * (LENGTH - split)
        assert_all_close(with_gradients(layer, x, lambda x, chunks=chunks: in_chunks(layer, x, chunks)), full)
    with torch.no_grad():
        for chunks in ((1,) * 11, (2, 3, 6), (5, 1, 5)):
            assert_close(in_chunks(layer, x, chunks), full[0], tolerance=TIGHT)


def test_left_padding_changes_nothing(layer):
    x, starts = data(batch=3), torch.tensor([0, 4, 9])
    out, grad = with_gradients(layer, x, lambda x: layer(x, starts=starts))[:2]
    with torch.no_grad():
        assert_close(in_chunks(layer, x, (3, 3, 1, 1, 3), starts), out, tolerance=TIGHT)
    for b, start in enumerate(starts.tolist()):
        alone = x[b : b + 1, start:].clone().requires_grad_()
        expected = layer(alone)
        assert_close(out[b : b + 1, start:], expected, tolerance=TIGHT)
        expected = torch.autograd.grad(expected, alone, data(3, seed=4)[b : b + 1, start:])[0]
        assert_close(grad[b : b + 1, start:], expected, tolerance=TIGHT)
        assert (out[b, :start] == 0).all()
        assert (grad[b, :start] == 0).all()


def test_packed_documents_each_have_their_own(layer):
    assert_packed_documents_are_separate(layer)


@pytest.mark.parametrize("label", LABELS)
def test_a_window_keeps_them_behind_its_oldest_position(label):
    assert_a_window_runs_past_max_length(build(label, max_length=4))


@pytest.mark.parametrize("grad", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("label", ["S-p", "S-pg!", "R-p", "G-p", "R-pcg-q-12o", "G-cg-q-12o"])
def test_a_sliding_window_decodes_token_by_token(label, grad):
    layer, x = build(label, sliding_window=3), data()
    with torch.set_grad_enabled(grad):
        assert_close(in_chunks(layer, x, [1] * LENGTH), layer(x), tolerance=TIGHT)
        assert_close(in_chunks(layer, x, [3, 2] + [1] * (LENGTH - 5)), layer(x), tolerance=TIGHT)


def test_nothing_visible_gives_nothing(layer):
    """And a gradient of zero to everything, as distributed training wants it."""
    for value in with_gradients(layer, data(), lambda x: layer(x, starts=torch.tensor([LENGTH, LENGTH]))):
        assert (value == 0).all()


def test_shapes_alone():
    layer = build("G-cg-q-12o").to("meta")
    x, starts = data().to("meta"), torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    assert layer(x, starts=starts).shape == x.shape


def test_peers_have_none():
    with pytest.raises(ValueError, match="only labels have registers"):
        HyperMLPConfig(mixer="gla", num_hidden_layers=1, num_registers=2)


def test_a_short_input_and_more_registers_than_positions():
    layer = build("R-cg-q-12o", num_registers=9, max_length=2)
    x, plain = data(length=1), without_registers(layer)
    assert_close(
        layer(x), plain(torch.cat([layer.registers.expand(2, -1, -1), x], dim=1))[:, 9:], tolerance=TIGHT
    )


def test_they_are_counted():
    layer = build("G-cg-q-12o")
    assert sum(p.numel() for p in layer.parameters()) == parameter_count(layer.config)
    assert forward_flops(layer.config, LENGTH) > forward_flops(without_registers(layer).config, LENGTH)


def test_a_capture_shows_them_as_the_first_positions():
    layer = build("G-pcg-q-12o")
    x = data(batch=1)
    seen, out = capture(layer, x), layer(x)
    assert_close(seen.contributions(COUNT + 6).sum((0, 1)), out[0, 6], tolerance=TIGHT)
    assert seen.width(COUNT + 6) == COUNT + 7
    with pytest.raises(ValueError, match="one whole sequence at a time"):
        capture(layer, x, starts=torch.tensor([2]))


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_how_many(value):
    with pytest.raises(ValueError, match=r"num_registers is .*; it must be an integer, 0 or more"):
        HyperGLU(16, max_length=8, num_registers=value)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = HyperMLPConfig(
        mixer=["G-cg-q-12o", "S-p"],
        hidden_size=16,
        num_hidden_layers=2,
        max_position_embeddings=32,
        vocab_size=50,
        num_registers=COUNT,
    )
    return randomise_(HyperMLPForCausalLM(config).eval()).double()


def test_a_model_generates_as_it_reads(model):
    prompts = torch.randint(1, 50, (2, 6))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    ask = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = model.generate(prompts, attention_mask=mask, **ask)
    alone = model.generate(prompts[1:, 2:], attention_mask=mask[1:, 2:], **ask)
    assert torch.equal(together[1, 2:], alone[0])
    uncached = model.generate(prompts, attention_mask=mask, use_cache=False, **ask)
    assert torch.equal(together, uncached)


def test_a_model_is_saved_with_them(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = HyperMLPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = torch.randint(50, (1, 9))
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_fresh_model_initialises_them():
    torch.manual_seed(1)
    config = HyperMLPConfig(
        hidden_size=64, num_hidden_layers=1, max_position_embeddings=32, vocab_size=50, num_registers=50
    )
    registers = HyperMLPForCausalLM(config).model.layers[0].mixer.registers
    assert 0.018 < registers.std().item() < 0.022
