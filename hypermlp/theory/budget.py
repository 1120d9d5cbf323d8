"""Where parameters should go: a narrow second layer confines the output, a narrow first layer only what it is conditioned on."""

from typing import Any

import torch

from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import parameter_table
from hypermlp.theory.check import check, largest
from hypermlp.theory.geometry import bend
from hypermlp.theory.mlp import T, far, full
from hypermlp.theory.objects import Step, random_layer, random_rows


@check(
    "A narrow W2 confines the update to a subspace",
    where="Theorem thm:lowrank_W2_invariant, Corollary cor:W2_invariant_functionals, Theorem thm:core_budget_asymmetry (i)",
    says="part of the layer's outputs outside the columns of W_o, which is a quarter as wide as the input, over the outputs",
    within=1e-9,
)
def a_narrow_readout_confines_the_update(base: str) -> float:
    layer, X = random_layer(f"{base}-c-v"), random_rows(T)
    outputs = layer(X[None])[0]
    columns, _ = torch.linalg.qr(layer.o_proj.weight)
    outside = outputs - outputs @ columns @ columns.T
    explicit = Step(layer, X).o(X[-1])
    return largest(float(outside.norm() / outputs.norm()), far(outputs[-1], explicit))


@check(
    "A narrow W1 only narrows the conditioning",
    where="Theorem thm:lowrank_W1_quotient, Theorem thm:core_budget_asymmetry (ii)",
    says="change of the output when the query moves within the null space of W_q; not a number if other moves change nothing",
    within=1e-9,
)
def a_narrow_address_only_narrows_conditioning(base: str) -> float:
    layer = random_layer(f"{base}-c-q")
    step, x = Step(layer, random_rows(T)), random_rows(1, seed=4)[0]
    _, _, rows = torch.linalg.svd(layer.q_proj.weight)
    null = rows[layer.config.qk_width :]
    if far(step.real(x + 0.3 * rows[0]), step.real(x)) < 1e-3:
        return float("nan")
    return largest(*(far(step.real(x + 2 * direction), step.real(x)) for direction in null))


@check(
    "Shrinking QK pays for mixing, and buys curved routing",
    where="Proposition prop:param_budget_efficiency",
    says="bend of the operator's boundaries in a layer with mixing whose parameters fit into those of attention without; 0 if they do not",
    at_least=1e-2,
)
def shrinking_qk_pays_for_mixing(base: str) -> float:
    d, t, rank, heads = 64, 16, 2, 1
    sizes: dict[str, Any] = {"hidden_size": d, "max_length": t, "rank": rank, "num_heads": heads}
    wide = MixerConfig.from_label(base, **sizes)
    narrow = MixerConfig.from_label(f"{base}-12o!", **sizes, qk_width=d // 4)
    temporal = 4 * t * rank + 2 * t + 2 * d * rank
    matrices = narrow.num_branches + narrow.num_heads
    parts = parameter_table(narrow)
    bound = (
        temporal * matrices / 2 + matrices * rank
    )  # the paper counts one branch and one head, and no biases
    saved = 2 * d * (wide.qk_width - narrow.qk_width)
    fits = parts["mix1"] + parts["mix2"] == bound <= saved and sum(parts.values()) <= sum(
        parameter_table(wide).values()
    )
    if not fits:
        return 0.0
    layer = random_layer(f"{base}-12o!", **sizes, qk_width=d // 4)
    return bend(Step(layer, random_rows(9, d)))


@check(
    "An adapter on V or O adds at most its rank in directions",
    where="Proposition prop:core_empirical_short (ii), equation eq:imp_lora_w2_delta",
    says="rank + 1st singular value of what an adapter of rank 2 changes in 40 outputs, over the first",
    within=1e-9,
)
def an_adapter_adds_its_rank(base: str) -> float:
    rank, worst = 2, 0.0
    # A gate between V and O would turn an adapter's directions on V with x; for a fixed x there are no more of them.
    for projection, label in (("o_proj", full(base)), ("v_proj", f"{base}-c-12o!")):
        layer, X, queries = random_layer(label, num_heads=1), random_rows(T), random_rows(40, seed=3)
        before = torch.stack([Step(layer, X).real(x) for x in queries])
        weight = getattr(layer, projection).weight
        weight += random_rows(weight.shape[0], rank, seed=4) @ random_rows(rank, weight.shape[1], seed=5)
        after = torch.stack([Step(layer, X).real(x) for x in queries])
        values = torch.linalg.svdvals(after - before)
        worst = largest(worst, float(values[rank] / values[0])) if values[0] > 1e-3 else float("nan")
    return worst


@check(
    "A gate between V and O leaves routing alone",
    where="Proposition prop:core_empirical_short (ii), equation eq:imp_gated_vo_measure",
    says="change of the operator's weights when the output gate gets other parameters; not a number if the output stays",
    within=0,
)
def an_output_gate_leaves_routing_alone(base: str) -> float:
    layer, X = random_layer(full(base)), random_rows(T)
    x, step = X[-1], Step(layer, X)
    weights, output = step.real_weights(x), step.real(x)
    assert layer.gates is not None
    layer.gates.bias[layer.gate_sizes[0] : sum(layer.gate_sizes[:2])] += 2.0
    return far(step.real_weights(x), weights) if far(step.real(x), output) > 1e-3 else float("nan")
