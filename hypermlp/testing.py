"""Random inputs and comparisons that raise, for tests and benchmarks."""

import torch
from torch import nn

from hypermlp.ops.comparison import assert_close, assert_no_worse, relative_error
from hypermlp.ops.inputs import OpInputs, op_inputs

__all__ = ["OpInputs", "assert_close", "assert_no_worse", "op_inputs", "randomise_", "relative_error"]


def randomise_(module: nn.Module, *, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Give every parameter a random value, so that no part of a fresh layer hides behind zeros.

    Returns the module.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module
