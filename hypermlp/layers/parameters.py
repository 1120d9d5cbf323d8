"""The parameters of a mixer layer, counted without building it; ``hypermlp.costs.mixer`` offers them."""

from collections import Counter

import torch

from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.baselines.base import BaselineConfig
from hypermlp.layers.canon import TAPS
from hypermlp.layers.registry import Config, layer_of


def meta_layer(config: BaselineConfig) -> SequenceMixer:
    """Return the layer of a baseline on PyTorch's meta device, where it takes no memory."""
    with torch.device("meta"):
        layer = layer_of(config)
    return layer


def parameter_table(config: Config) -> dict[str, int]:
    """Return the layer's parameters by part.

    The parts of a label are "projections", "conv", "canon", "feature_gates", "mix1", "mix2" (both with their
    gates) and "registers"; a part that it does not have is 0. Those of a baseline are its modules.

    Example::

        from hypermlp import MixerConfig
        from hypermlp.costs.mixer import parameter_table

        print(parameter_table(MixerConfig(hidden_size=768, max_length=1024)))
    """
    if isinstance(config, BaselineConfig):
        parts: Counter[str] = Counter()
        for name, parameter in meta_layer(config).named_parameters():
            parts[name.split(".")[0]] += parameter.numel()
        return dict(parts)
    hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
    # Per head: left, right and diag for every slot, and the gate's matrix and bias.
    mix = config.num_slots * (2 * config.rank + 1) + (hidden + 1) * config.rank
    return {
        "projections": 2 * hidden * (qk + vo),
        "conv": 2 * hidden * config.conv_kernel if config.conv else 0,
        "canon": (2 * qk + vo) * TAPS if config.canon else 0,
        "feature_gates": (hidden + 1) * (qk + vo) if config.feature_gates else 0,
        "mix1": config.num_branches * mix if config.mix1 else 0,
        "mix2": config.num_heads * mix if config.mix2 else 0,
        "registers": hidden * config.num_registers,
    }


def parameter_count(config: Config) -> int:
    """Return the number of parameters of the layer: the sum of ``parameter_table``."""
    return sum(parameter_table(config).values())
