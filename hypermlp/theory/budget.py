"""Where parameters should go: a narrow W2 confines the output, a narrow W1 only its conditioning."""

from typing import Any

import torch

from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import parameter_table
from hypermlp.inspect.internals import by_gate
from hypermlp.theory.check import check, far, largest, provided
from hypermlp.theory.geometry import bend, excess_rank
from hypermlp.theory.objects import Step, T, full, random_layer, random_query, random_rows, random_step

ADAPTERS = "Proposition prop:core_empirical_short (ii)"


@check(
    "Theorem thm:lowrank_W2_invariant",
    "Corollary cor:W2_invariant_functionals",
    "Theorem thm:core_budget_asymmetry (i)",
    within=1e-9,
)
def a_narrow_readout_confines_the_update(base: str) -> float:
    """A narrow W2 confines the update to a subspace.

    Measured: the part of the layer's outputs outside the columns of W_o, which is a quarter as wide as the
    input, relative to the outputs; or the largest difference between the last output and the paper's formula,
    if that is larger.
    """
    layer, X = random_layer(f"{base}-c-v"), random_rows(T)
    outputs = layer(X[None])[0]
    columns, _ = torch.linalg.qr(layer.o_proj.weight)
    outside = outputs - outputs @ columns @ columns.T
    return largest([float(outside.norm() / outputs.norm()), far(outputs[-1], Step(layer, X).o(X[-1]))])


@check("Theorem thm:lowrank_W1_quotient", "Theorem thm:core_budget_asymmetry (ii)", within=1e-9)
def a_narrow_address_only_narrows_conditioning(base: str) -> float:
    """A narrow W1 only narrows the conditioning.

    Measured: the largest change of the output when the query moves within the null space of W_q; NaN if other
    moves change nothing.
    """
    step, x = random_step(f"{base}-c-q"), random_query(seed=4)
    _, _, directions = torch.linalg.svd(step.layer.q_proj.weight)
    here, elsewhere = step.real(x), step.real(x + 0.3 * directions[0])
    null_space = directions[step.config.qk_width :]
    return provided(
        far(elsewhere, here) >= 1e-3, largest(far(step.real(x + 2 * d), here) for d in null_space)
    )


@check("Proposition prop:param_budget_efficiency", at_least=1e-2)
def shrinking_qk_pays_for_mixing(base: str) -> float:
    """Shrinking QK pays for mixing, and buys curved routing.

    Measured: the bend of the operator's boundaries in a layer with mixing that has no more parameters than
    attention without; NaN if it has more.
    """
    d, t, rank = 64, 16, 2
    sizes: dict[str, Any] = {"hidden_size": d, "max_length": t, "rank": rank, "num_heads": 1}
    shrunk = sizes | {"qk_width": d // 4}
    wide, narrow = MixerConfig.from_label(base, **sizes), MixerConfig.from_label(f"{base}-12o!", **shrunk)
    parts, matrices = parameter_table(narrow), narrow.num_branches + narrow.num_heads
    temporal = 4 * t * rank + 2 * t + 2 * d * rank  # the paper's count: one branch and one head, no biases
    saved = 2 * d * (wide.qk_width - narrow.qk_width)
    fits = parts["mix1"] + parts["mix2"] == temporal * matrices / 2 + matrices * rank <= saved
    no_more = sum(parts.values()) <= sum(parameter_table(wide).values())
    return provided(fits and no_more, bend(random_step(f"{base}-12o!", **shrunk)))


@check(ADAPTERS, "equation eq:imp_lora_w2_delta", within=1e-9)
def an_adapter_adds_its_rank(base: str) -> float:
    """An adapter on V or O adds at most its rank in directions.

    Measured: the singular value rank + 1 of the change that an adapter of rank 2 makes in 40 outputs,
    relative to the first one; NaN if nothing changes.
    """
    rank, queries = 2, random_rows(40, seed=3)

    def excess(projection: str, label: str) -> float:
        layer, X = random_layer(label, num_heads=1), random_rows(T)
        before = torch.stack([Step(layer, X).real(x) for x in queries])
        weight = getattr(layer, projection).weight
        weight += random_rows(weight.shape[0], rank, seed=4) @ random_rows(rank, weight.shape[1], seed=5)
        return excess_rank(before, torch.stack([Step(layer, X).real(x) for x in queries]), rank)

    # An output gate would turn the directions of an adapter on V with x: its label has no feature gates.
    return largest([excess("o_proj", full(base)), excess("v_proj", f"{base}-c-12o!")])


@check(ADAPTERS, "equation eq:imp_gated_vo_measure", within=0)
def an_output_gate_leaves_routing_alone(base: str) -> float:
    """A gate between V and O leaves routing alone.

    Measured: the largest change of the operator's weights when the output gate gets other parameters; NaN if
    the output does not change.
    """
    step = random_step(full(base))
    weights, output = step.real_weights(step.newest), step.real(step.newest)
    assert step.layer.gates is not None
    by_gate(step.layer, step.layer.gates.bias)["output"].add_(2.0)
    change = far(step.real(step.newest), output)
    return provided(change > 1e-3, far(step.real_weights(step.newest), weights))
