"""The operator: one function, several backends."""

from hypermlp.ops.api import hyper_attention
from hypermlp.ops.arguments import Mix
from hypermlp.ops.dispatch import available_backends

__all__ = ["Mix", "available_backends", "hyper_attention"]
