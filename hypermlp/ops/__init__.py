"""The operator: ``hyper_attention`` computes one layer's heads from queries, keys and values, on any backend.

``Mix`` is a sequence mix, an argument of the operator; ``available_backends()`` lists the implementations.
"""

from hypermlp.ops.api import hyper_attention
from hypermlp.ops.arguments import Mix
from hypermlp.ops.dispatch import available_backends

__all__ = ["Mix", "available_backends", "hyper_attention"]
