"""The parameters of a model, counted from its configuration, and models that cannot fit into memory."""

import os
from collections import Counter
from collections.abc import Callable

from hypermlp.errors import UserError
from hypermlp.layers.canon import TAPS
from hypermlp.layers.parameters import parameter_table
from hypermlp.layers.registry import Config
from hypermlp.models.configuration_hypermlp import HyperMLPConfig

GIB = 2**30


def mixer_parts(config: HyperMLPConfig, table: Callable[[Config], dict[str, int]]) -> dict[str, int]:
    """Sum a table of costs by part over the mixers of all layers."""
    parts: Counter[str] = Counter()
    mixers = Counter(config.mixer_config(index) for index in range(config.num_hidden_layers))
    for mixer, layers in mixers.items():
        parts.update({f"mixer: {part}": layers * count for part, count in table(mixer).items()})
    return dict(parts)


def mlp_parameters(config: HyperMLPConfig) -> int:
    """Return the parameters of the MLP of one block."""
    assert config.intermediate_size is not None
    return (2 if config.block == "gpt2" else 3) * config.hidden_size * config.intermediate_size


def canon_parameters(config: HyperMLPConfig) -> int:
    """Return the parameters of the Canon layers of one block outside its mixer."""
    return sum(config.canon_widths.values()) * TAPS


def model_parameter_table(config: HyperMLPConfig) -> dict[str, int]:
    """Return the model's parameters by part."""
    rows = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    if config.learned_positions:
        rows += config.max_position_embeddings
    return mixer_parts(config, parameter_table) | {
        "MLPs": config.num_hidden_layers * mlp_parameters(config),
        "canon": config.num_hidden_layers * canon_parameters(config),
        "norms": (2 * config.num_hidden_layers + 1) * config.hidden_size,
        "embeddings": rows * config.hidden_size,
    }


def model_parameters(config: HyperMLPConfig) -> int:
    """Return the number of parameters of the model."""
    return sum(model_parameter_table(config).values())


def require_memory(config: HyperMLPConfig, where: str) -> None:
    """Raise if the float32 weights of a model exceed this machine's memory; ``where`` names its source."""
    count = model_parameters(config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > memory:
        raise UserError(
            f"{where} describes a model of {count:.3g} parameters, {4 * count / GIB:,.0f} GiB in "
            f"float32; this machine has {memory / GIB:,.0f} GiB. Lower hidden_size ({config.hidden_size}), "
            f"vocab_size ({config.vocab_size}), num_hidden_layers ({config.num_hidden_layers}), "
            f"intermediate_size ({config.intermediate_size}), rank ({config.rank}) or "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
