"""The learning rate of each step, and which parameters have weight decay."""

import itertools
import math
from typing import Any

from torch import nn

from hypermlp.layers.base import SequenceMixer
from hypermlp.train.recipe import TrainingSettings


def learning_rate_factor(step: int, training: TrainingSettings) -> float:
    """Return the fraction of ``training.learning_rate`` that optimizer step ``step``, counted from 0, uses.

    It rises linearly during the warm-up, then falls along a cosine to ``min_learning_rate`` and stays there.
    """
    if step < training.warmup_steps:
        return (step + 1) / (training.warmup_steps + 1)
    end = training.decay_steps or training.steps
    floor = training.min_learning_rate / training.learning_rate
    if step >= end:
        return floor
    progress = (step - training.warmup_steps) / max(1, end - training.warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_groups(model: nn.Module, training: TrainingSettings) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups, the one with weight decay first; tied parameters occur once."""
    undecayed = {
        id(getattr(m, name)) for m in model.modules() if isinstance(m, SequenceMixer) for name in m.undecayed
    }

    def decays(parameter: nn.Parameter) -> bool:
        return training.decayed == "all" or (parameter.dim() >= 2 and id(parameter) not in undecayed)

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": list(filter(decays, parameters)), "weight_decay": training.weight_decay},
        {"params": list(itertools.filterfalse(decays, parameters)), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
