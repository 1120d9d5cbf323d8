"""Rotary positions and their scaling against their definitions."""

import math

import pytest
import torch

from hypermlp import Mixer
from hypermlp.errors import UserError
from hypermlp.layers.rotary import Rope, rotate
from hypermlp.testing import assert_close, randomise_

PLAIN = Rope(1e4)
SCALED = {
    "ntk": {"rope_type": "ntk", "rope_factor": 8.0},
    "yarn": {"rope_type": "yarn", "rope_factor": 8.0, "rope_original_length": 16},
}


def frequencies(rope, width=16):
    return rope.frequencies(width, torch.device("cpu"), torch.float64)


def test_rotation_keeps_length_and_depends_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        return (rotate(q, torch.tensor([[i]]), PLAIN) * rotate(k, torch.tensor([[j]]), PLAIN)).sum()

    assert_close(score(7, 3), score(107, 103), tolerance=1e-10)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    assert_close(rotate(q, torch.tensor([[9]]), PLAIN).norm(), q.norm(), tolerance=1e-12)
    assert_close(rotate(q, torch.tensor([[0]]), PLAIN), q, tolerance=0)
    expected = q[..., 0] * torch.cos(torch.tensor(5.0, dtype=torch.float64)) - q[..., 4] * torch.sin(
        torch.tensor(5.0, dtype=torch.float64)
    )
    assert_close(rotate(q, torch.tensor([[5]]), PLAIN)[..., 0], expected, tolerance=1e-12)


def test_scaled_frequencies_follow_their_formulas():
    """Channel by channel, in plain Python."""
    width, s, context = 16, 8.0, 128
    ntk, yarn = (frequencies(Rope(1e4, kind, s, context)).tolist() for kind in ("ntk", "yarn"))
    for i in range(width // 2):
        plain = 1e4 ** (-2 * i / width)
        assert ntk[i] == pytest.approx((1e4 * s ** (width / (width - 2))) ** (-2 * i / width), rel=1e-12)
        turns = context * plain / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - 1) / 31))
        assert yarn[i] == pytest.approx(kept * plain + (1 - kept) * plain / s, rel=1e-12)
    assert ntk[0] == 1.0
    assert ntk[-1] == pytest.approx(1e4 ** (-14 / 16) / s, rel=1e-12)  # the slowest turns s times slower
    few = frequencies(Rope(1e4, "yarn", s, context, 0.5, 2.0))
    assert few[2] == frequencies(PLAIN)[2]
    assert few[-1] == frequencies(PLAIN)[-1] / s
    assert Rope(1e4, "yarn", s, context).magnitude == pytest.approx(0.1 * math.log(s) + 1)
    assert Rope(1e4, "ntk", s).magnitude == 1


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
def test_factor_1_is_plain_rope(kind):
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64)
    positions = torch.arange(9)[None]
    assert_close(rotate(x, positions, Rope(1e4, kind, 1.0, 16)), rotate(x, positions, PLAIN), tolerance=1e-12)


@pytest.mark.parametrize("settings", [{}, {"num_registers": 2}, {"sliding_window": 5}], ids=str)
@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("label", ["S-p", "S-pc", "R-pcg-q-12o"])
def test_training_prefill_and_decoding_agree(label, kind, settings):
    """One by one through the kernel for a decoding step, which gets the scaled angles, and in chunks."""
    layer = Mixer.from_label(label, hidden_size=32, max_length=24, **SCALED[kind], **settings)
    randomise_(layer).double()
    x, starts = torch.randn(2, 24, 32, dtype=torch.float64), torch.tensor([0, 5])
    whole = layer(x, starts=starts)
    plain = Mixer.from_label(label, hidden_size=32, max_length=24, **settings).double()
    plain.load_state_dict(layer.state_dict())
    assert (plain(x, starts=starts) - whole).abs().max() > 1e-3  # the scaling is not ignored
    for sizes in ([1] * 24, [7, 1, 1, 15]):
        with torch.no_grad():
            state, parts = layer.new_state(2), x.split(sizes, dim=1)
            out = torch.cat([layer(part, state=state, starts=starts) for part in parts], dim=1)
        assert_close(out, whole, tolerance=1e-10)


@pytest.mark.parametrize("kind", SCALED)
def test_a_state_of_fixed_size_has_the_same_angles(kind):
    layer = randomise_(Mixer.from_label("S-p", hidden_size=32, max_length=24, **SCALED[kind])).double()
    x = torch.randn(2, 24, 32, dtype=torch.float64)
    with torch.no_grad():
        state = layer.new_state(2, capacity=24)
        out = torch.cat([layer(part, state=state) for part in x.split(1, dim=1)], dim=1)
    assert_close(out, layer(x), tolerance=1e-10)


@pytest.mark.parametrize(
    ("label", "settings", "message"),
    [
        ("S-p", {"rope_type": "linear"}, "rope_type is 'linear'; it must be 'default', 'ntk' or 'yarn'"),
        ("S", SCALED["ntk"], "rope_type is 'ntk'; it must be 'default' in a layer without rotary positions"),
        (
            "S-p",
            {"rope_factor": 2.0},
            "rope_factor is 2.0; .* 1.0 unless rope_type is 'ntk' or 'yarn'",
        ),
        ("S-p", {"rope_type": "ntk", "rope_factor": 0.5}, "rope_factor is 0.5; .* at least 1"),
        ("S-p", {"rope_type": "ntk", "rope_factor": float("nan")}, "rope_factor is nan"),
        ("S-p", {"rope_type": "yarn", "rope_factor": 2.0}, "rope_original_length is None; .* for rope_type"),
        ("S-p", {"rope_original_length": 8}, "rope_original_length is 8; .* None unless rope_type is 'yarn'"),
        ("S-p", {**SCALED["ntk"], "rope_beta_fast": 2.0}, "rope_beta_fast is 2.0; .* 32.0 unless"),
        (
            "S-p",
            {**SCALED["yarn"], "rope_beta_fast": 0.5},
            "rope_beta_fast is 0.5; it must be above rope_beta",
        ),
        ("S-p", {**SCALED["ntk"], "qk_width": 4}, "qk_width is 4; it must be at least 8 for rope_type 'ntk'"),
    ],
)
def test_bad_scaling_is_refused(label, settings, message):
    with pytest.raises(UserError, match=message):
        Mixer.from_label(label, hidden_size=32, max_length=24, **settings)
