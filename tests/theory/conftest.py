"""Mistakes planted in the operator's definition: each replaces functions of ``hypermlp.ops.reference``."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hypermlp.ops import reference
from hypermlp.ops.dispatch import use_backend

CORRECT = SimpleNamespace(**vars(reference))
"""The functions of the definition, whatever is planted in its module."""


def changed_arguments(change):
    """Return ``trace`` with the arguments replaced that ``change(arguments)`` returns by name.

    Only this function depends on how ``trace`` takes its arguments.
    """

    def trace(arguments, *maps):
        return CORRECT.trace(arguments._replace(**change(arguments)), *maps)

    return {"trace": trace}


def changed_output(change):
    """Return ``trace`` with the output replaced by ``change(output)``."""

    def trace(arguments, *maps):
        found = CORRECT.trace(arguments, *maps)
        return found._replace(output=change(found.output))

    return {"trace": trace}


def changed_mix(change):
    """Return ``_times_R`` with other parts of both mixes, which ``change(p, A, B, s)`` returns."""
    return {"_times_R": lambda y, p, A, B, s: CORRECT._times_R(y, *change(p, A, B, s))}


def with_function(module, **functions):
    """Return a namespace with everything in ``module`` but with other functions under these names."""
    return SimpleNamespace(**(vars(module) | functions))


def exchanged_branches(arguments):
    """Exchange the gate and scale branches of "glu"; relu has none."""
    if arguments.q.shape[2] == arguments.v.shape[2]:
        return {}

    def exchange(x, dim):
        return torch.cat(x.chunk(2, dim)[::-1], dim)

    mix1 = arguments.mix1 and type(arguments.mix1)(*map(exchange, arguments.mix1, (0, 0, 0, 2)))
    return {"q": exchange(arguments.q, 2), "k": exchange(arguments.k, 2), "mix1": mix1}


def unmasked_after_mixing():
    """Leave out the mask behind R1; scores and weights keep theirs, through ``_reorder``."""

    def reorder(x, index, keep):
        return CORRECT._masked(x.gather(-1, index.expand(x.shape)), keep)

    return {"_masked": lambda x, keep: x, "_reorder": reorder}


def norm_over_all_slots():
    """Normalise before the mask behind R1 instead of after it."""
    masks = []  # of the mix that is about to be normalised, if there is one

    def masked(x, keep):
        masks.append(keep)
        return x

    def l2norm(h, eps):
        normalised = CORRECT._l2norm(h, eps)
        return CORRECT._masked(normalised, masks.pop()) if masks else normalised

    return unmasked_after_mixing() | {"_masked": masked, "_l2norm": l2norm}


def future_visible(*arguments):
    return torch.ones_like(CORRECT.visible_keys(*arguments))


def lag_off_by_one(*arguments):
    return tuple((slots - 1).clamp(min=0) for slots in CORRECT.slot_maps(*arguments))


MISTAKES = {
    "mask before R1 only": unmasked_after_mixing(),
    "R2 not transposed": {"_times_R_transposed": CORRECT._times_R},
    "norm over all slots": norm_over_all_slots(),
    "lag off by one": {"slot_maps": lag_off_by_one},
    "gate without sigmoid": changed_mix(lambda p, A, B, s: (p, A, B, torch.logit(s))),
    "low rank without gate": changed_mix(lambda p, A, B, s: (p, A, B, torch.ones_like(s))),
    "diagonal left out": changed_mix(lambda p, A, B, s: (torch.zeros_like(p), A, B, s)),
    "no relu": {"F": with_function(F, relu=lambda x: x)},
    "no norm": {"_l2norm": lambda h, eps: h},
    "branches exchanged": changed_arguments(exchanged_branches),
    "relu for softplus": {"_softplus": F.relu},
    "the future is visible": {"visible_keys": future_visible},
    "mixes are left out": {"_times_R": lambda y, *mix: y},
    "starts are ignored": changed_arguments(lambda arguments: {"starts": None}),
}
NOT_A_NUMBER = changed_output(lambda output: torch.full_like(output, torch.nan))
NONSENSE = changed_output(lambda output: 1e6 * torch.randn_like(output))  # other numbers each time


@pytest.fixture
def planted():
    """``with planted(functions):`` makes the definition, with these functions replaced, the backend."""

    @contextmanager
    def plant(functions):
        with use_backend("reference"), mock.patch.dict(vars(reference), functions):
            yield

    return plant
