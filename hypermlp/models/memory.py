"""Refuse models that cannot fit into memory before anything is allocated."""

import os

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.models.configuration_hypermlp import HyperMLPConfig

GIB = 2**30


def least_parameters(config: HyperMLPConfig) -> int:
    """Return a lower bound of the number of parameters, without building any part of the model."""
    assert config.intermediate_size is not None
    hidden, count = config.hidden_size, config.vocab_size * config.hidden_size
    for index in range(config.num_hidden_layers):
        mixer = config.mixer_config(index)
        count += 2 * hidden * config.intermediate_size
        if isinstance(mixer, MixerConfig):
            mixes = mixer.num_branches * mixer.mix1 + mixer.num_heads * mixer.mix2
            count += 2 * hidden * mixer.conv_kernel * mixer.conv
            count += 2 * hidden * (mixer.qk_width + mixer.vo_width) + 2 * mixes * mixer.num_slots * mixer.rank
    return count


def require_memory(config: HyperMLPConfig, where: str) -> None:
    """Raise if the float32 weights of a model exceed this machine's memory; ``where`` names its source."""
    count = least_parameters(config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > memory:
        raise UserError(
            f"{where} describes a model of {count:.3g} parameters or more, {4 * count / GIB:,.0f} GiB in "
            f"float32; this machine has {memory / GIB:,.0f} GiB. Lower hidden_size ({config.hidden_size}), "
            f"vocab_size ({config.vocab_size}), num_hidden_layers ({config.num_hidden_layers}), "
            f"intermediate_size ({config.intermediate_size}), rank ({config.rank}) or "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
