"""A longer or shorter context for an existing model."""

import copy
from typing import Any

from torch import nn

from hypermlp.config import is_integer, require
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.resizing import check_method, resize_


def extend_context_(model: Any, n: int, method: str) -> None:
    """Do what ``HyperMLPPreTrainedModel.extend_context`` documents; ``model`` has a ``HyperMLPConfig``."""
    require("n", n, is_integer(n) and n > 0, "a positive integer: the number of positions")
    check_method(method)
    changed = copy.copy(model.config)
    changed.max_position_embeddings = int(n)
    configs = [changed.mixer_config(index) for index in range(changed.num_hidden_layers)]  # raises first
    mixers = [module for module in model.modules() if isinstance(module, SequenceMixer)]
    for mixer, config in zip(mixers, configs, strict=True):
        mixer.resize_(config, method)
    positions = model.base_model.embed_positions
    if positions is not None:
        assert isinstance(positions, nn.Embedding)
        resize_(positions.weight, int(n), method, dim=0)
        positions.num_embeddings = int(n)
    model.config.max_position_embeddings = int(n)
