"""The operator: one function, several backends."""

from hypermlp.ops.api import hyper_attention
from hypermlp.ops.backends import available_backends
from hypermlp.ops.types import Mix

__all__ = ["Mix", "available_backends", "hyper_attention"]
