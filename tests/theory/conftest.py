"""Mistakes that somebody might make in the operator, each as an operator of its own."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hypermlp.ops import reference as definition
from hypermlp.ops.layout import slot_maps, visible_keys


def mistaken(mistake):
    """The definition, line by line, with one mistake in it."""

    def attend(q, k, v, mix1, mix2, starts, *, activation, layout, eps, backend):
        Tq, Tk = q.shape[1], k.shape[1]
        if mistake == "starts are ignored":
            starts = None
        visible = visible_keys(starts, Tq, Tk, q.device)[:, None]
        if mistake == "the future is visible":
            visible = torch.ones_like(visible)
        key_of_slot, slot_of_key = (m[:, None] for m in slot_maps(layout, starts, Tq, Tk, q.device))
        if mistake == "lag off by one":
            key_of_slot, slot_of_key = ((m - 1).clamp(min=0) for m in (key_of_slot, slot_of_key))
        exists = torch.arange(Tk) < visible.sum(-1, keepdim=True)
        if mistake == "mixes are left out":
            mix1 = mix2 = None
        mixes = [mix1, mix2]
        for i, mix in enumerate(mixes):
            if mix is not None and mistake == "gate without sigmoid":
                mixes[i] = mix._replace(gate=torch.logit(mix.gate))
            if mix is not None and mistake == "low rank without gate":
                mixes[i] = mix._replace(gate=torch.ones_like(mix.gate))
            if mix is not None and mistake == "diagonal left out":
                mixes[i] = mix._replace(diag=torch.zeros_like(mix.diag))
        mix1, mix2 = mixes
        z = definition._reorder(torch.einsum("bihd,bjhd->bhij", q, k), key_of_slot, exists)
        mixed = z if mix1 is None else definition._times_R(z, *mix1)
        h = mixed if mistake == "mask before R1 only" else definition._masked(mixed, exists)
        gate, scale = h.chunk(2, dim=1) if activation == "glu" else (h, None)
        if mistake == "branches exchanged" and scale is not None:
            gate, scale = scale, gate
        over = mixed.chunk(2, dim=1)[0] if activation == "glu" else mixed
        rho = (
            (over if mistake == "norm over all slots" else gate).square().sum(-1, keepdim=True) + eps
        ).sqrt()
        if mistake == "no norm":
            rho = torch.ones_like(rho)
        a = gate / rho if mistake == "no relu" else F.relu(gate / rho)
        if scale is not None:
            a = a * (
                F.relu(scale)
                if mistake == "relu for softplus"
                else torch.logaddexp(scale, torch.zeros_like(scale))
            )
        times = definition._times_R if mistake == "R2 not transposed" else definition._times_R_transposed
        w = a if mix2 is None else times(a, *mix2)
        return torch.einsum("bhij,bjhd->bihd", definition._reorder(w, slot_of_key, visible), v)

    return attend


def not_a_number(q, k, v, mix1, mix2, starts, **_how):
    return torch.full((*q.shape[:2], *v.shape[2:]), torch.nan, dtype=q.dtype)


def nonsense(q, k, v, mix1, mix2, starts, **_how):
    """Anything, and something else each time."""
    return 1e6 * torch.randn(*q.shape[:2], *v.shape[2:], dtype=q.dtype)


MISTAKES = [
    "mask before R1 only",
    "R2 not transposed",
    "norm over all slots",
    "lag off by one",
    "gate without sigmoid",
    "low rank without gate",
    "diagonal left out",
    "no relu",
    "no norm",
    "branches exchanged",
    "relu for softplus",
    "the future is visible",
    "mixes are left out",
    "starts are ignored",
]


@pytest.fixture
def planted():
    """``with planted(operator):`` every layer calls this operator."""

    @contextmanager
    def plant(operator):
        with mock.patch("hypermlp.layers.mixer.attend", operator):
            yield

    return plant
