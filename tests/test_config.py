"""Contradictions raise; labels set the switches that they stand for."""

import numpy as np
import pytest

from hypermlp import MixerConfig
from hypermlp.label import PAPER_ROWS


def test_default_is_hyperglu():
    assert MixerConfig(hidden_size=768, max_length=1024) == MixerConfig.from_label(
        "G-cg-q-12o", hidden_size=768, max_length=1024
    )


def test_labels_set_the_switches():
    config = MixerConfig.from_label("R-pc-2!", hidden_size=64, max_length=8)
    assert (config.activation, config.rope, config.conv, config.feature_gates) == ("relu", True, True, False)
    assert (config.mix1, config.mix2, config.layout, config.qk_width, config.vo_width) == (
        False,
        True,
        "forward",
        64,
        64,
    )
    assert MixerConfig.from_label("S-c-v", hidden_size=64, max_length=8).vo_width == 16
    assert MixerConfig.from_label("R-cg-q", hidden_size=64, max_length=8, compression=8).qk_width == 8


def test_all_labels_fit_the_papers_sizes():
    for label in PAPER_ROWS:
        for hidden, length in ((128, 128), (768, 1024)):
            assert MixerConfig.from_label(label, hidden_size=hidden, max_length=length).hidden_size == hidden


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
        ({"max_length": 2.5}, "max_length is 2.5"),
        ({"num_heads": True}, "num_heads is True; it must be a positive integer"),
        ({"hidden_size": 62}, "hidden_size is 62; it must be a multiple of 16, such as 48 or 64: "),
        ({"hidden_size": 5}, "hidden_size is 5; it must be a multiple of 16, such as 16: "),
        ({"hidden_size": 80, "rope": True}, "hidden_size is 80; it must be a multiple of 32"),
        ({"conv": "off"}, "conv is 'off'; it must be True or False"),
        ({"qk_width": -4}, "qk_width is -4"),
        ({"num_heads": 3}, "hidden_size is 64; it must be a multiple of 24, such as 48 or 72: "),
        ({"num_heads": 3, "qk_width": 12}, "vo_width is 64; it must be a positive multiple of 3"),
        ({"vo_width": 33}, "vo_width is 33; it must be a positive multiple of 2"),
        ({"activation": "gelu"}, "activation is 'gelu'; it must be 'softmax', 'relu' or 'glu'"),
        ({"layout": "ring"}, "layout is 'ring'"),
        ({"rank": -1}, "rank is -1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"rope": True, "qk_width": 12}, "qk_width is 12; it must be a multiple of 8, since RoPE"),
    ],
)
def test_contradictions_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        MixerConfig(**({"hidden_size": 64, "max_length": 8} | settings))


def test_from_label_refuses_unknown_and_contradicting_settings():
    with pytest.raises(ValueError, match="unknown setting 'ranks'; allowed: compression, canon, conv_kernel"):
        MixerConfig.from_label("S", hidden_size=64, max_length=8, ranks=3)
    with pytest.raises(ValueError, match="label 'S' already sets rope"):
        MixerConfig.from_label("S", hidden_size=64, max_length=8, rope=True)
    for compression in (1000, 5):
        with pytest.raises(
            ValueError, match=f"hidden_size is 64; it must be a multiple of {2 * compression}"
        ):
            MixerConfig.from_label("R-cg-q", hidden_size=64, max_length=8, compression=compression)
    with pytest.raises(ValueError, match="hidden_size is None"):
        MixerConfig.from_label("S", hidden_size=None, max_length=8)
    with pytest.raises(ValueError, match="compression is 0"):
        MixerConfig.from_label("S", hidden_size=64, max_length=8, compression=0)


def test_numpy_integers_are_integers():
    assert MixerConfig(hidden_size=np.int64(64), max_length=np.int32(8)) == MixerConfig(
        hidden_size=64, max_length=8
    )
