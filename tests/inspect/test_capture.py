"""A capture shows what the layer computes, and does not change it."""

import pytest
import torch

from hypermlp import HyperGLU, Mixer
from hypermlp.inspect import capture, capture_model
from hypermlp.layers import build_mixer
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

LABELS = ["R-cg-q-12o", "G-cg-q-12o", "G-pcg-q-12o", "R-12!", "S-p", "G", "R-c-v"]
T = 11


@pytest.fixture(params=LABELS)
def layer(request):
    layer = Mixer.from_label(request.param, hidden_size=32, max_length=16, rank=3).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return layer


@pytest.fixture(params=["whole", "padded", "packed"])
def starts(request):
    return {
        "whole": None,
        "padded": torch.tensor([0, 4]),
        "packed": torch.tensor([[0] * 5 + [5] * 6, [0] * 2 + [2] * 9]),
    }[request.param]


def test_contributions_are_the_output(layer, starts):
    x = torch.randn(2, T, 32, dtype=torch.float64)
    seen, out = capture(layer, x, starts=starts), layer(x, starts=starts)
    for batch in range(2):
        for t in range(T):
            torch.testing.assert_close(
                seen.contributions(t, batch).sum((0, 1)), out[batch, t], atol=1e-10, rtol=0
            )


def test_adapters_and_hooks_are_refused():
    layer, x = HyperGLU(32, max_length=16), torch.randn(1, 5, 32)
    hook = layer.o_proj.register_forward_hook(lambda module, given, out: out + 1)
    with pytest.raises(ValueError, match="o_proj has an adapter or hooks"):
        capture(layer, x)
    hook.remove()
    with pytest.raises(ValueError, match="which is 0; it must be 1 or 2"):
        capture(layer, x).mix(0, 0, t=4)


def test_both_layers_make_an_mlp(layer, starts):
    x = torch.randn(2, T, 32, dtype=torch.float64)
    seen, out, config = capture(layer, x, starts=starts), layer(x, starts=starts), layer.config
    for batch, t in ((0, 0), (0, 7), (1, 1), (1, T - 1)):
        width = seen.width(t, batch)
        for branch in range(config.num_branches):
            h = seen.inputs[batch, t] @ seen.first_layer(branch, t, batch)
            torch.testing.assert_close(h, seen.trace.pre_activation[batch, branch, t, :width])
        activation = seen.trace.activation[batch, :, t, :width]
        total = sum(activation[head] @ seen.second_layer(head, t, batch) for head in range(config.num_heads))
        torch.testing.assert_close(total, out[batch, t])


def test_slots_are_combinations_of_rows():
    layer = HyperGLU(16, max_length=16, rank=3).double()
    x = torch.randn(1, T, 16, dtype=torch.float64)
    seen = capture(layer, x)
    U, V = seen.pool(0, T - 1)
    keys = layer.k_proj.weight[: layer.config.qk_dim]
    address = seen.heads.q[0, -1, 0] @ keys @ U.T
    torch.testing.assert_close(address, seen.trace.pre_activation[0, 0, -1])
    values = V @ layer.v_proj.weight[: layer.config.vo_dim].T
    torch.testing.assert_close(seen.read_out(values, 0, T - 1), seen.second_layer(0, T - 1))


def test_active_slots_and_norm():
    layer = Mixer.from_label("R-cg-q-12o", hidden_size=16, max_length=16).double()
    seen = capture(layer, torch.randn(1, T, 16, dtype=torch.float64))
    h = seen.trace.pre_activation
    assert torch.equal(seen.active, seen.trace.activation > 0)
    torch.testing.assert_close(seen.trace.activation, h.clamp(min=0) / seen.rho[..., None])
    assert [seen.width(t) for t in range(T)] == list(range(1, T + 1))
    assert seen.key_of_slot[0, 5, :6].tolist() == [5, 4, 3, 2, 1, 0]
    torch.testing.assert_close(seen.contribution_sizes()[:, -1], seen.contributions(T - 1).norm(dim=-1))


def test_a_model_is_captured_and_not_changed():
    config = HyperMLPConfig(
        mixer=["G-cg-q-12o", "gla", "R-cg-q-12o"],
        hidden_size=16,
        num_hidden_layers=3,
        max_position_embeddings=32,
        vocab_size=50,
    )
    model = HyperMLPForCausalLM(config).eval()
    tokens = torch.randint(50, (1, 20))
    before = model(tokens).logits
    first, baseline, last = capture_model(model, tokens)
    assert baseline is None
    assert (first.config.activation, last.config.activation) == ("glu", "relu")
    assert torch.equal(model(tokens).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    mixed = model.model.layers[0].mixer(first.inputs)
    torch.testing.assert_close(first.contributions(19).sum((0, 1)), mixed[0, 19], atol=1e-5, rtol=0)


def test_a_baseline_is_refused():
    with pytest.raises(ValueError, match="has no memory pool; allowed: a layer of a label"):
        capture(build_mixer("gla", hidden_size=32, max_length=16), torch.randn(1, 4, 32))
