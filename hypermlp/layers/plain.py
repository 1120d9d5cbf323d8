"""Whether a module computes exactly what its parameters say, so that a kernel may read them instead."""

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.nn.modules import module as modules

from hypermlp.layers.gates import Gates
from hypermlp.layers.mixing import SequenceMix

PARAMETERS: dict[type, tuple[str, ...]] = {
    nn.Linear: ("weight",),
    Gates: ("weight", "bias"),
    SequenceMix: ("diag", "left", "right"),
}
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (nn.Linear, Gates, SequenceMix)}

SHADOWING: dict[type, set[str]] = {
    nn.Linear: {"forward", "weight", "bias"},
    Gates: {"forward", "weight", "bias", "logits", "split", "fused"},
    SequenceMix: {"forward", "diag", "left", "right"},
}
"""Names that would replace a method or a parameter if they were attributes of the module itself."""


def is_plain(part: nn.Module, kind: type) -> bool:
    """Return True if the module computes what its parameters say, as a module of this kind.

    It must be no adapter and have no hooks, no bias that the kind does not have, and nothing that a library
    has added; its tensors must be ordinary ones, and its ``forward`` must not be replaced, neither on the
    module (as accelerate does) nor on its class. There must be no hooks for all modules.
    """
    return not has_global_hooks() and plain_alone(part, kind)


def has_global_hooks() -> bool:
    """Return True if there are hooks for all modules (``torch.nn.modules.module.register_module_...``)."""
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


def plain_alone(part: nn.Module, kind: type) -> bool:
    """Do what ``is_plain`` documents, without looking for hooks of all modules."""
    if (
        type(part) is not kind
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or part._buffers
        or part._modules
        or not part.__dict__.keys().isdisjoint(SHADOWING[kind])
        or kind.forward is not _FORWARDS[kind]
    ):
        return False
    names, count = PARAMETERS[kind], 0
    for name, value in part._parameters.items():
        if value is not None:
            if name not in names or not (type(value) is Parameter or is_ordinary(value)):
                return False
            count += 1
    return count == len(names)


def is_ordinary(x: Any) -> bool:
    """Return True for a parameter or tensor, also a fake one, that no library reads in its own way."""
    return type(x) is Parameter or type(x) is Tensor or isinstance(x, FakeTensor)
