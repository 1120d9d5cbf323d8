"""Initial values of parameters, for layers, models and benchmarks alike.

Matrices and embeddings are N(0, std), biases zero, norms one. A module with parameters of another kind has a
method ``initialize_parameters(init, std)``.
"""

from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class HasOwnParameters(Protocol):
    """A module that sets the initial values of its own parameters."""

    def initialize_parameters(self, init: Any, std: float) -> None: ...


def _copy_(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


PLAIN = SimpleNamespace(
    normal_=nn.init.normal_,
    uniform_=nn.init.uniform_,
    zeros_=nn.init.zeros_,
    ones_=nn.init.ones_,
    copy_=_copy_,
)
"""Functions that set a parameter.

``transformers.initialization`` has the same ones, which skip loaded parameters.
"""


def initialize_(module: nn.Module, std: float, init: Any = PLAIN) -> None:
    """Initialise the parameters of ``module`` itself, not those of its submodules."""
    if isinstance(module, nn.Linear | nn.Embedding):
        init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        if module.weight is not None:
            init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            init.zeros_(module.bias)
    elif isinstance(module, HasOwnParameters):
        module.initialize_parameters(init, std)
