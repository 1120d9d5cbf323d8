"""Learning: how outputs move when parameters do, and when the active set stays."""

import math
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

from hypermlp.theory.check import check, far
from hypermlp.theory.objects import Step, full, random_layer, random_rows, random_step


@check("Theorem thm:ntk-gradient-flow", within=1e-5)
def predictions_follow_the_tangent_kernel(base: str) -> float:
    """Predictions follow the tangent kernel.

    Measured: the largest difference between the slope of the layer's output along the gradient flow, by steps
    of 1e-7 both ways, and the kernel's prediction, relative to the latter.
    """
    layer, size = random_layer(full(base)), 1e-7
    parameters = dict(layer.named_parameters())
    theta = parameters_to_vector(parameters.values())
    *train, test = random_rows(3 * 5, seed=2).view(3, 5, -1)

    def output(z: Tensor, theta: Tensor) -> Tensor:
        parts = theta.split([parameter.numel() for parameter in parameters.values()])
        named = {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
        return functional_call(layer, named, (z[None],))[0, -1]

    def jacobian(z: Tensor) -> Tensor:
        """``[D, number of parameters]``"""
        return torch.autograd.functional.jacobian(partial(output, z), theta)

    errors = torch.stack([output(z, theta) for z in train]) - random_rows(2, seed=3)
    jacobians = torch.stack([jacobian(z) for z in train])
    prediction = -torch.einsum("dp,nep,ne->d", jacobian(test), jacobians, errors)
    flow = -torch.einsum("nep,ne->p", jacobians, errors)
    slope = (output(test, theta + size * flow) - output(test, theta - size * flow)) / (2 * size)
    return far(slope, prediction) / float(prediction.abs().max())


@check("Lemma lem:ntk-gate-stability-margin", within=0)
def a_margin_keeps_the_active_set(base: str) -> float:
    """The active set is stable under a margin.

    Measured: the number of slots that become active or inactive in the operator when the parameters move so
    that all of h moves by less than its margin, over 50 moves.
    """
    start = random_step(full(base), num_heads=1)
    X, x = random_rows(start.t), start.newest
    h, before = start.h(x), start.active(x)

    def changes(seed: int) -> float:
        """Count the slots that a move towards a random layer changes, halved until within the margin."""
        layer = random_layer(full(base), num_heads=1, seed=100 + seed)
        for _ in range(20):
            step = Step(layer, X)
            if far(step.h(x), h) < float(h.abs().min()):
                return float((step.active(x) != before).sum())
            for parameter, origin in zip(layer.parameters(), start.layer.parameters(), strict=True):
                parameter.lerp_(origin, 0.5)
        return math.nan

    return sum(map(changes, range(50)))
