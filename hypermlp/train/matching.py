"""Models with equal numbers of parameters, for fair comparisons."""

from typing import Any

import torch

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.validation import require

MATCH, MATCH_TOLERANCE = "match_parameters", 0.005


def matched_config(settings: dict[str, Any], mixer: str) -> HyperMLPConfig:
    """Choose the MLP width so that the model has as many parameters as the same model with ``mixer`` and
    without Canon layers.

    Raise if the closest count is more than MATCH_TOLERANCE away, or if ``settings`` fixes the width.
    """
    given = settings.get("intermediate_size")
    require("model.intermediate_size", given, given is None, f"left out: model.{MATCH} sets it")
    own_width = int(HyperMLPConfig(**settings).intermediate_size or 0)
    target = _parameter_count(settings | {"mixer": mixer, "canon": ""})
    count = _parameter_count(settings)
    per_column = _parameter_count(settings | {"intermediate_size": own_width + 1}) - count
    matched = settings | {"intermediate_size": own_width + round((target - count) / per_column)}
    reachable = f"a mixer whose parameter count ({target:,}) some MLP width reaches; this model has {count:,}"
    require(f"model.{MATCH}", mixer, matched["intermediate_size"] > 0, reachable)
    off = abs(_parameter_count(matched) / target - 1)
    closest = f"{reachable}; the closest width is {off:.1%} off"
    require(f"model.{MATCH}", mixer, off <= MATCH_TOLERANCE, closest)
    return HyperMLPConfig(**matched)


def _parameter_count(settings: dict[str, Any]) -> int:
    with torch.device("meta"):
        return HyperMLPForCausalLM(HyperMLPConfig(**settings)).num_parameters()
