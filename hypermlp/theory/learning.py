"""Learning: how outputs move when parameters do, and when the active set stays."""

import torch
from torch import Tensor
from torch.func import functional_call

from hypermlp.theory.check import check
from hypermlp.theory.mlp import T, far, full
from hypermlp.theory.objects import Step, random_layer, random_rows


@check(
    "Predictions follow the tangent kernel",
    where="Theorem thm:ntk-gradient-flow",
    says="slope of the layer's output along the gradient flow, by steps of 1e-7 both ways, against the kernel's prediction, relative",
    within=1e-5,
)
def predictions_follow_the_tangent_kernel(base: str) -> float:
    layer = random_layer(full(base)).requires_grad_(True)
    parameters: dict[str, Tensor] = dict(layer.named_parameters())
    size = 1e-7
    inputs = random_rows(3 * 5, seed=2).view(3, 5, -1)
    targets = random_rows(2, seed=3)

    def output(z: Tensor, at: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, at, (z[None],))[0, -1]

    def jacobian(z: Tensor) -> Tensor:
        """``[D, number of parameters]``"""
        out = output(z, parameters)
        rows = [
            torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
            for value in out
        ]
        zeros = [torch.zeros_like(parameter) for parameter in parameters.values()]
        return torch.stack(
            [
                torch.cat([(g if g is not None else z0).flatten() for g, z0 in zip(row, zeros, strict=True)])
                for row in rows
            ]
        )

    train, test = inputs[:2], inputs[2]
    errors = [output(z, parameters).detach() - y for z, y in zip(train, targets, strict=True)]
    jacobians = [jacobian(z) for z in train]
    kernel_says = -sum(
        (jacobian(test) @ J.T @ error for J, error in zip(jacobians, errors, strict=True)),
        torch.zeros_like(targets[0]),
    )
    gradient = sum(
        (J.T @ error for J, error in zip(jacobians, errors, strict=True)),
        torch.zeros(jacobians[0].shape[1], dtype=test.dtype),
    )

    def moved(by: float) -> dict[str, Tensor]:
        parts = gradient.split([parameter.numel() for parameter in parameters.values()])
        return {
            name: p.detach() - by * part.view_as(p)
            for (name, p), part in zip(parameters.items(), parts, strict=True)
        }

    measured = (output(test, moved(size)) - output(test, moved(-size))).detach() / (2 * size)
    return far(measured, kernel_says) / float(kernel_says.abs().max())


@check(
    "The active set is stable under a margin",
    where="Lemma lem:ntk-gate-stability-margin",
    says="active slots of the operator that change when all of h moves by less than its margin, over 50 moves of the parameters",
    within=0,
)
def a_margin_keeps_the_active_set(base: str) -> float:
    X = random_rows(T)
    x, label = X[-1], full(base)
    start = Step(random_layer(label, num_heads=1), X)
    h, before = start.h(x, 0), start.real_weights(x, mixed=False)[0] > 0
    margin, changed, moved = float(h.abs().min()), 0, 0
    for seed in range(50):
        layer, other = random_layer(label, num_heads=1), random_layer(label, num_heads=1, seed=100 + seed)
        share = 1.0
        while True:  # the longest of these moves that keeps within the margin
            for parameter, one, two in zip(
                layer.parameters(), start.layer.parameters(), other.parameters(), strict=True
            ):
                parameter.copy_(one + share * (two - one))
            step = Step(layer, X)
            if far(step.h(x, 0), h) < margin:
                break
            share /= 2
        moved += share > 1e-6
        changed += int(((step.real_weights(x, mixed=False)[0] > 0) != before).sum())
    return float(changed) if moved == 50 else float("nan")
