"""Models with equal numbers of parameters, for fair comparisons."""

from typing import Any

from hypermlp.models import HyperMLPConfig
from hypermlp.models.parameters import model_parameters
from hypermlp.validation import require

MATCH, MATCH_TOLERANCE = "match_parameters", 0.005


def matched_config(settings: dict[str, Any], mixer: str) -> HyperMLPConfig:
    """Choose the MLP width so that the model has as many parameters as the same model with ``mixer`` and
    without Canon layers.

    Raise if the closest count is more than MATCH_TOLERANCE away, or if ``settings`` fixes the width.
    """
    given = settings.get("intermediate_size")
    require("model.intermediate_size", given, given is None, f"left out: model.{MATCH} sets it")
    own, other = HyperMLPConfig(**settings), HyperMLPConfig(**(settings | {"mixer": mixer, "canon": ""}))
    count, target = model_parameters(own), model_parameters(other)
    width = int(own.intermediate_size or 0)
    wider = HyperMLPConfig(**(settings | {"intermediate_size": width + 1}))
    width += round((target - count) / (model_parameters(wider) - count))
    reachable = f"a mixer whose parameter count ({target:,}) some MLP width reaches; this model has {count:,}"
    require(f"model.{MATCH}", mixer, width > 0, reachable)
    matched = HyperMLPConfig(**(settings | {"intermediate_size": width}))
    off = abs(model_parameters(matched) / target - 1)
    closest = f"{reachable}; the closest width is {off:.1%} off"
    require(f"model.{MATCH}", mixer, off <= MATCH_TOLERANCE, closest)
    return matched
