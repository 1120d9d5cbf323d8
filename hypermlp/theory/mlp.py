"""A head is a two-layer MLP whose weights the context instantiates."""

import torch

from hypermlp.theory.check import check, largest
from hypermlp.theory.objects import Step, random_layer, random_rows

T = 9


def full(base: str) -> str:
    """The label of HyperMLP or HyperGLU."""
    return f"{base}-cg-q-12o"


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@check(
    "ReLU is diagonal gating",
    where="Lemma lem:relu-diagonal-gating",
    says="the operator's activation against h D(h), D the diagonal matrix of signs",
    within=1e-9,
)
def relu_is_diagonal_gating(base: str) -> float:
    X = random_rows(T)
    step, x = Step(random_layer(full(base)), X), X[-1]
    worst = 0.0
    for head, activation in enumerate(step.real_weights(x, mixed=False)):
        h = step.h(x, head)
        gated = h @ torch.diag((h > 0).double())
        worst = largest(worst, far(activation * step.rho(h), step.strength(x, head) * gated))
    return worst


@check(
    "L2 normalisation does not change which slots are active",
    where="Lemma lem:gate-invariance-reachable",
    says="slots whose activation in the operator is positive where h is not, or the other way round, over 200 inputs",
    within=0,
)
def gates_are_invariant_under_the_norm(base: str) -> float:
    X, queries = random_rows(T), random_rows(200, seed=2)
    step = Step(random_layer(full(base)), X)
    return float(
        sum(
            int(((a > 0) != (step.h(x, head) > 0)).sum())
            for x in queries
            for head, a in enumerate(step.real_weights(x, mixed=False))
        )
    )


@check(
    "A two-layer ReLU network selects a linear sub-network",
    where="Theorem thm:fixed-2layer-relu-subnetwork",
    says="rho times the output of a head with fixed weights, second difference where the active set stays",
    within=1e-9,
    bases=("R",),
)
def fixed_weights_select_a_sub_network(base: str) -> float:
    layer = random_layer(f"{base}-12o!", static=True, num_heads=1)
    step, worst, regions = Step(layer, random_rows(T)), 0.0, 0
    for x, direction in zip(random_rows(20, seed=2), random_rows(20, seed=3), strict=True):
        points = [x - 0.01 * direction, x, x + 0.01 * direction]
        patterns = [step.real_weights(point, mixed=False) > 0 for point in points]
        if torch.equal(patterns[0], patterns[1]) and torch.equal(patterns[1], patterns[2]):
            before, here, after = (step.rho(step.h(point, 0)) * step.real(point) for point in points)
            worst, regions = largest(worst, far(before + after, 2 * here)), regions + 1
    return worst if regions > 5 else float("nan")


@check(
    "Dynamic two-layer form",
    where="Proposition prop:dynamic_two_layer_form, Theorem thm:core_dynamic_head (i)",
    says="the layer's output at every position against sigma(x W1(X)) W2(X), summed over heads",
    within=1e-9,
)
def the_layer_is_a_dynamic_two_layer_mlp(base: str) -> float:
    layer, X = random_layer(full(base)), random_rows(T)
    outputs = layer(X[None])[0]
    return largest(*(far(outputs[t], Step(layer, X[: t + 1]).o(X[t])) for t in range(T)))


@check(
    "HyperGLU decouples routing and magnitude",
    where="Proposition prop:core_hyperglu",
    says="active slots that change when the scale branch gets other weights; not a number if no strength changes",
    within=0,
    bases=("G",),
)
def routing_does_not_see_the_scale(base: str) -> float:
    layer, X = random_layer(full(base)), random_rows(T)
    x = X[-1]
    before = Step(layer, X).real_weights(x, mixed=False)
    scale_rows = slice(layer.config.qk_width // 2, None)
    layer.q_proj.weight[scale_rows] = random_rows(layer.config.qk_width // 2, seed=7)
    after = Step(layer, X).real_weights(x, mixed=False)
    changed = far(before, after) > 1e-3
    return float(((before > 0) != (after > 0)).sum()) if changed else float("nan")
