"""Counted costs equal the design study's table, the built layer, and sums over single steps."""

import pytest
import torch

from hypermlp import Mixer, MixerConfig
from hypermlp.costs.mixer import (
    core_flops,
    flops_table,
    forward_flops,
    parameter_count,
    state_bytes,
)
from hypermlp.label import PAPER_ROWS

# Parameters per mixer layer at width 128 and 128 slots, and at width 768 and 1024 slots.
COUNTS = {
    "S": (65_536, 2_359_296),
    "S-p": (65_536, 2_359_296),
    "S-c": (66_560, 2_365_440),
    "S-pc": (66_560, 2_365_440),
    "R": (65_536, 2_359_296),
    "R-p": (65_536, 2_359_296),
    "R-c": (66_560, 2_365_440),
    "R-pc": (66_560, 2_365_440),
    "S-g-q": (61_600, 2_212_800),
    "R-cg-q": (62_624, 2_218_944),
    "R-c-12o!": (91_712, 2_549_824),
    "R-cg-q-12o": (87_776, 2_403_328),
    "R-pcg-q-12o": (87_776, 2_403_328),
    "S-c-q": (41_984, 1_480_704),
    "S-c-v": (41_984, 1_480_704),
    "R-c-q": (41_984, 1_480_704),
    "R-c-v": (41_984, 1_480_704),
    "G-cg-q": (62_624, 2_218_944),
    "G-c-12o!": (104_288, 2_642_016),
    "G-cg-q-12o": (100_352, 2_495_520),
    "G-pcg-q-12o": (100_352, 2_495_520),
    "G-cg-q-1o": (87_776, 2_403_328),
    "R-cg-q-1o": (75_200, 2_311_136),
    "G-g-q-12o": (99_328, 2_489_376),
    "R-g-q-12o": (86_752, 2_397_184),
    "G-12o!": (103_264, 2_635_872),
    "G-1o!": (90_688, 2_543_680),
    "G-2o!": (78_112, 2_451_488),
    "R-12o!": (90_688, 2_543_680),
    "R-1o!": (78_112, 2_451_488),
    "R-2!": (78_112, 2_451_488),
    "G-12!": (103_264, 2_635_872),
    "R-12!": (90_688, 2_543_680),
}


def test_the_table_is_complete():
    assert set(COUNTS) == set(PAPER_ROWS)


@pytest.mark.parametrize("label", COUNTS)
def test_parameters_equal_the_table_and_the_layer(label):
    for (hidden, length), expected in zip(((128, 128), (768, 1024)), COUNTS[label], strict=True):
        config = MixerConfig.from_label(label, hidden_size=hidden, max_length=length)
        assert parameter_count(config) == expected
        with torch.device("meta"):
            layer = Mixer(config)
        assert sum(p.numel() for p in layer.parameters()) == expected


def test_the_matched_budget_is_within_eight_percent():
    attention = 4 * 768**2
    for label, compression, share in (
        ("R-cg-q-12o", 8, 0.925),
        ("G-cg-q-12o", 8, 0.964),
        ("R-cg-q-12o", 4, 1.019),
        ("G-cg-q-12o", 4, 1.058),
    ):
        config = MixerConfig.from_label(label, hidden_size=768, max_length=1024, compression=compression)
        assert abs(parameter_count(config) / attention - share) < 0.001


@pytest.mark.parametrize("label", COUNTS)
def test_flops_are_the_sum_over_steps(label):
    config = MixerConfig.from_label(label, hidden_size=64, max_length=32)
    steps = [forward_flops(config, 1, t) for t in range(1, 33)]
    assert forward_flops(config, 32) == sum(steps)
    assert forward_flops(config, 10, 32) == sum(steps[22:])
    assert core_flops(config, 32) == sum(
        flops_table(config, 32)[part] for part in ("scores", "mix1", "mix2", "readout")
    )


def test_projection_flops_are_those_of_the_matrix_products():
    """PyTorch's counter sees projections as plain matrix products; the operator's are batched or opaque."""
    from torch.utils.flop_counter import FlopCounterMode

    config = MixerConfig.from_label("G-cg-q-12o", hidden_size=64, max_length=16)
    layer = Mixer(config)
    layer.backend = "blocked"  # the native kernels are opaque
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, 16, 64))
    counts = counter.get_flop_counts()["Global"]
    counted = counts.get(torch.ops.aten.mm, 0) + counts.get(torch.ops.aten.addmm, 0)
    table = flops_table(config, 16)
    assert table["projections"] + table["feature_gates"] + table["mix_gates"] == counted


def test_hyperglu_does_less_core_work_than_attention():
    hyperglu = MixerConfig.from_label("G-cg-q-12o", hidden_size=768, max_length=1024)
    attention = MixerConfig.from_label("S", hidden_size=768, max_length=1024)
    assert core_flops(hyperglu, 1024) / core_flops(attention, 1024) == (192 + 768 + 192) / 1536


def test_state_bytes_are_those_of_the_tensors():
    for label in ("G-cg-q-12o", "S"):
        layer = Mixer.from_label(label, hidden_size=64, max_length=16)
        state = layer.new_state(3, rollback=0)
        layer(torch.randn(3, 9, 64), state=state)
        needed = [state.keys, state.values]
        if state.inputs is not None:
            needed.append(state.inputs[:, 1 - layer.config.conv_kernel :])
        held = sum(x.numel() * x.element_size() for x in needed)
        assert state_bytes(layer.config, 9, batch_size=3) == held
    assert state_bytes(layer.config, 9, dtype=torch.bfloat16) == 9 * 128 * 2


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="5 queries for 4 keys"):
        flops_table(MixerConfig(hidden_size=64, max_length=8), 5, 4)
