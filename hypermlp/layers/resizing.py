"""Another context for existing parameters: learned rows, one per slot or position, are added or dropped.

The first rows stay as they are, so a model computes on its old lengths what it did before. For slots in lag
order that is the paper's extension consistency; in the layout "forward" it holds because a context of n
positions uses the first n slots.
"""

import functools
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hypermlp.errors import UserError
from hypermlp.validation import find_option

LAST_ROWS = 32  # whose mean the method "mean" takes


def _zeros(rows: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:])


def _mean(rows: Tensor, count: int) -> Tensor:
    return rows[-LAST_ROWS:].mean(0, keepdim=True).expand(count, *rows.shape[1:])


def _repeated(rows: Tensor, count: int) -> Tensor:
    half = len(rows) // 2
    return rows[half + torch.arange(count, device=rows.device) % (len(rows) - half)]


def _stretched(rows: Tensor, count: int) -> Tensor:
    half, total = len(rows) // 2, len(rows) + count
    slots = torch.arange(len(rows), total, device=rows.device, dtype=torch.float64)
    place = half + (len(rows) - 1 - half) * (slots / len(rows)).log() / math.log(total / len(rows))
    low = place.long()
    share = (place - low).to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    return torch.lerp(rows[low], rows[(low + 1).clamp(max=len(rows) - 1)], share)


METHODS = {"zero": _zeros, "mean": _mean, "repeat": _repeated, "log-lag": _stretched}
DEFAULT_METHOD = "repeat"
"""What added rows hold: zeros, the mean of the last rows, the far half of the rows again and again, or the
far half stretched over the logarithm of the lag."""


def check_method(method: str) -> None:
    """Raise for a method that does not exist."""
    find_option("method", method, METHODS)


@torch.no_grad()
def resize_(parameter: Tensor, count: int, method: str, *, dim: int) -> None:
    """Give a parameter ``count`` rows along ``dim``, in place: the first ones stay, ``METHODS`` has the rest.

    The parameter remains the same object, so that an optimizer without a state for it can go on. One with a
    state raises UserError at its next step.
    """
    old_shape, rows = parameter.shape, parameter.detach().movedim(dim, 0)
    if len(rows) == count:
        return
    added = METHODS[method](rows, max(0, count - len(rows)))
    parameter.data = torch.cat([rows[:count], added]).movedim(0, dim).contiguous()
    parameter.grad = None
    _former_shapes(parameter).add(old_shape)


# By the id of a parameter: a weak reference to it, and the shapes that it once had.
_resized: dict[int, tuple[Any, set[torch.Size]]] = {}


def _former_shapes(parameter: Tensor) -> set[torch.Size]:
    """Return the shapes that the parameter once had, to add to; from the first one on, optimizers are
    checked.
    """
    _check_optimizers()
    key = id(parameter)
    if key not in _resized:
        _resized[key] = (weakref.ref(parameter, lambda _: _resized.pop(key, None)), set())
    return _resized[key][1]


@functools.cache
def _check_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_old_state)


def _refuse_old_state(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    """Raise if an optimizer holds a state of a parameter's former shape.

    PyTorch's optimizers do not check the shapes themselves; fused ones would read beyond the end.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            former = _resized[id(parameter)][1] if id(parameter) in _resized else set()
            for name, value in optimizer.state.get(parameter, {}).items() if former else ():
                if isinstance(value, Tensor) and value.shape in former - {parameter.shape}:
                    raise UserError(
                        f"the optimizer's {name} has shape {list(value.shape)}, its parameter "
                        f"{list(parameter.shape)}: the context has changed since; make a new optimizer"
                    )
