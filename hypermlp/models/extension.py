"""A longer or shorter context for an existing model."""

import copy
from typing import Any

from torch import nn

from hypermlp.config import ROPE_SCALING, ROPE_TYPES, SCALING_OF_ROPE_TYPE
from hypermlp.errors import UserError
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.resizing import check_method, resize_
from hypermlp.models.configuration_hypermlp import HyperMLPConfig, has_rope
from hypermlp.models.parameters import require_memory
from hypermlp.validation import LARGEST_SIZE, is_integer, require


def scale_rope_(config: HyperMLPConfig, n: int, rope_type: str) -> None:
    """Scale the rotary frequencies for a context of ``n`` positions instead of the present one."""
    old, kinds = config.max_position_embeddings, ROPE_TYPES[1:]
    require("rope_type", rope_type, rope_type in kinds, f"{' or '.join(map(repr, kinds))}, or left out")
    allowed = f"left out for {config.mixer!r}, which has no rotary label (the letter p, such as S-p)"
    require("rope_type", rope_type, any(map(has_rope, config.mixers)), allowed)
    require("n", n, n >= old, f"at least the present context of {old} if rope_type is given")
    trained = config.rope_original_length or round(old / config.rope_factor)
    scaling = {"rope_type": rope_type, "rope_factor": n / trained, "rope_original_length": trained}
    for name in ROPE_SCALING:
        value = scaling.get(name, getattr(config, name))
        reads = name == "rope_type" or name in SCALING_OF_ROPE_TYPE[rope_type]
        setattr(config, name, value if reads else getattr(HyperMLPConfig, name))


def extend_context_(model: Any, n: int, method: str, rope_type: str | None) -> None:
    """Do what ``HyperMLPPreTrainedModel.extend_context`` documents; ``model`` has a ``HyperMLPConfig``."""
    allowed = f"a positive integer, the number of positions, at most {LARGEST_SIZE:,}"
    require("n", n, is_integer(n) and 0 < n <= LARGEST_SIZE, allowed)
    check_method(method)
    changed = copy.copy(model.config)
    window = max((each for each in changed.windows if each is not None), default=0)
    if n < window:
        raise UserError(
            f"n is {n}, a context shorter than the sliding window of {window}; load the model with a smaller "
            "sliding_window first, or with None"
        )
    if rope_type is not None:
        scale_rope_(changed, int(n), rope_type)
    changed.max_position_embeddings = int(n)
    require_memory(changed, f"a context of {n}")
    configs = [changed.mixer_config(index) for index in range(changed.num_hidden_layers)]  # raises first
    mixers = [module for module in model.modules() if isinstance(module, SequenceMixer)]
    for mixer, config in zip(mixers, configs, strict=True):
        mixer.resize_(config, method)
    positions = model.base_model.embed_positions
    if positions is not None:
        assert isinstance(positions, nn.Embedding)
        resize_(positions.weight, int(n), method, dim=0)
        positions.num_embeddings = int(n)
    for name in ("max_position_embeddings", *ROPE_SCALING):
        setattr(model.config, name, getattr(changed, name))
