"""A head is a two-layer MLP whose weights are instantiated from the context."""

import torch
from torch import Tensor

from hypermlp.theory.check import check, far, largest, provided, size
from hypermlp.theory.geometry import lines_within_cells, second_difference, static
from hypermlp.theory.objects import Step, T, full, random_layer, random_rows, random_step


@check("Lemma lem:relu-diagonal-gating", within=1e-9)
def relu_is_diagonal_gating(base: str) -> float:
    """ReLU is diagonal gating.

    Measured: the largest difference between rho times the operator's activation and h D(h), where D(h)
    is diagonal with 1 where h > 0 and 0 elsewhere (for HyperGLU, times the strength).
    """
    step = random_step(full(base))
    x = step.newest

    def gated(head: int) -> Tensor:
        h = step.h(x, head)
        return step.strength(x, head) * (h @ torch.diag((h > 0).double()))

    return largest(far(step.rho(x, head) * a, gated(head)) for head, a in enumerate(step.real_activation(x)))


@check("Lemma lem:gate-invariance-reachable", within=0)
def gates_are_invariant_under_the_norm(base: str) -> float:
    """L2 normalisation does not change which slots are active.

    Measured: the number of slots that the operator activates although h is not positive, or does not although
    it is, over 200 inputs.
    """
    step, queries = random_step(full(base)), random_rows(200, seed=2)
    h = torch.stack([step.h(queries, head) for head in range(step.config.num_heads)], dim=1)
    return float(((step.real_activation(queries) > 0) != (h > 0)).sum())


@check("Theorem thm:fixed-2layer-relu-subnetwork", within=1e-9, bases="R")
def fixed_weights_select_a_sub_network(base: str) -> float:
    """A two-layer ReLU network selects a linear sub-network.

    Measured: the largest second difference of rho times the output of a head with fixed weights, along lines
    over which the active set stays the same.
    """
    step = static(base)
    x, d = lines_within_cells(step, random_rows(20, seed=2), 0.01 * random_rows(20, seed=3))
    return size(second_difference(step.real_unnormalised, x, d))


@check("Proposition prop:dynamic_two_layer_form", "Theorem thm:core_dynamic_head (i)", within=1e-9)
def the_layer_is_a_dynamic_two_layer_mlp(base: str) -> float:
    """Dynamic two-layer form.

    Measured: the largest difference between the layer's output, at every position, and sigma(x W1(X)) W2(X),
    summed over heads.
    """
    layer, X = random_layer(full(base)), random_rows(T)
    outputs = layer(X[None])[0]
    return largest(far(outputs[t], Step(layer, X[: t + 1]).o(X[t])) for t in range(T))


@check("Proposition prop:core_hyperglu", within=0, bases="G")
def routing_does_not_see_the_scale(base: str) -> float:
    """HyperGLU decouples routing and magnitude.

    Measured: the number of slots that become active or inactive when the scale branch gets other weights; NaN
    if no activation changes.
    """
    step = random_step(full(base))
    before, half = step.real_activation(step.newest), step.config.qk_width // 2
    step.layer.q_proj.weight[half:] = random_rows(half, seed=7)
    after = step.real_activation(step.newest)
    return provided(far(before, after) > 1e-3, float(((before > 0) != (after > 0)).sum()))
