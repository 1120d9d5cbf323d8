"""What parameters and FLOPs buy.

A narrow W2 confines the output, a narrow W1 only its conditioning. A mix costs thin products, no matrix of
slots by slots, and no state of its own.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import core_flops, flops_table, parameter_table, state_bytes
from hypermlp.layers.internals import gate_parameters
from hypermlp.theory.check import check, far, largest, provided
from hypermlp.theory.geometry import bend, excess_rank
from hypermlp.theory.objects import (
    SIZES,
    Step,
    T,
    full,
    random_layer,
    random_query,
    random_rows,
    random_step,
    times,
)

ADAPTERS = "Proposition prop:core_empirical_short (ii)"
LARGER: dict[str, Any] = SIZES | {"hidden_size": 32}  # products with a dimension of 1 are not counted


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
    moved = step.real(x + 2 * directions[step.config.qk_width :])  # within the null space
    return provided(far(elsewhere, here) >= 1e-3, far(moved, here))


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


@check(ADAPTERS, "Section sec:app:imp_lora_vo", within=1e-9)
def an_adapter_adds_its_rank(base: str) -> float:
    """An adapter on V or O adds at most its rank in directions.

    Measured: the (rank + 1)-th singular value of the change that an adapter of rank 2 makes in 40 outputs,
    relative to the first one; NaN if nothing changes.
    """
    rank, queries = 2, random_rows(40, seed=3)

    def excess(projection: str, label: str) -> float:
        layer, X = random_layer(label, num_heads=1), random_rows(T)
        before = Step(layer, X).real(queries)
        weight = getattr(layer, projection).weight
        weight += random_rows(weight.shape[0], rank, seed=4) @ random_rows(rank, weight.shape[1], seed=5)
        return excess_rank(before, Step(layer, X).real(queries), rank)

    # An output gate would turn the directions of an adapter on V with x: its label has no feature gates.
    return largest([excess("o_proj", full(base)), excess("v_proj", f"{base}-c-12o!")])


@check(ADAPTERS, "Section sec:app:imp_gated_vo", within=0)
def an_output_gate_leaves_routing_alone(base: str) -> float:
    """A gate between V and O leaves routing alone.

    Measured: the largest change of the operator's weights when the output gate gets other parameters; NaN if
    the output does not change.
    """
    step = random_step(full(base))
    weights, output = step.real_weights(step.newest), step.real(step.newest)
    gate_parameters(step.layer)[1]["output"].add_(2.0)
    change = far(step.real(step.newest), output)
    return provided(change > 1e-3, far(step.real_weights(step.newest), weights))


@check("Lemma lem:app_cost_vec_dplr", within=1e-9)
def a_mix_is_two_thin_products(base: str) -> float:
    """Vector times DPLR.

    Measured: the largest difference between the operator's weights with the second mix and those without,
    times R2ᵀ, both written out and as two thin products.
    """
    step = random_step(full(base))
    x, mix = step.newest, step.mix(step.newest, 2)
    assert mix is not None
    p, A, B = (part[:, : step.t] for part in mix[:3])
    mixed, y = step.real_weights(x), step.real_activation(x)
    thin = y * (1 + p) + times(times(y, B) * mix.gate[0, 0], A.mT)
    R2 = torch.stack([step.R(x, 2, head) for head in range(step.config.num_heads)])
    return largest([far(mixed, times(y, R2.mT)), far(mixed, thin)])


def counted(base: str, t: int) -> float:
    """Return the FLOPs of the operator's definition for one query over t rows."""
    step = random_step(full(base), t, **LARGER)
    operator = step.operator(random_rows(1, step.config.hidden_size, seed=2)[0])
    with FlopCounterMode(display=False) as counter:
        operator(step.values, backend="reference")
    return float(counter.get_total_flops())


def off(measured: float, formula: float) -> float:
    """Return the relative difference."""
    return abs(measured / formula - 1)


@check("Proposition prop:app_cost_infer", "Proposition prop:core_cost_short", within=0)
def a_step_costs_what_it_should(base: str) -> float:
    """A step costs O(t (d_qk + d_vo + r)).

    Measured: the largest relative difference between the FLOPs counted in the operator's definition and
    2 t (qk + vo + 2 r (branches + heads)).
    """
    config = MixerConfig.from_label(full(base), **LARGER)
    per_row = config.qk_width + config.vo_width + 2 * config.rank * (config.num_branches + config.num_heads)
    counts = ((t, count) for t in (2, 5, 11, 16) for count in (counted(base, t), core_flops(config, 1, t)))
    return largest(off(count, 2 * t * per_row) for t, count in counts)


@check("Proposition prop:app_cost_train", within=0)
def training_overhead_is_quadratic_times_rank(base: str) -> float:
    """Training costs O(T² r) more than attention.

    Measured: the largest relative difference between the FLOPs that mixing adds, counted in the definition
    over steps 2 to T and taken from the cost table, and 4 r (branches + heads) per pair of a query and a key.
    """
    config, length = MixerConfig.from_label(full(base), **LARGER), 12
    pairs, per_pair = length * (length + 1) // 2, 4 * config.rank * (config.num_branches + config.num_heads)
    attention = 2 * (config.qk_width + config.vo_width)
    added = sum(counted(base, t) - attention * t for t in range(2, length + 1))
    table = flops_table(config, length)
    return largest([off(added, per_pair * (pairs - 1)), off(table["mix1"] + table["mix2"], per_pair * pairs)])


@check("Proposition prop:app_cost_infer", within=0)
def mixing_keeps_no_state(base: str) -> float:
    """Mixing keeps no state.

    Measured: the bytes of decoding state that a layer has beyond those of one without mixing, after 10 rows;
    NaN if decoding gives another output than the whole sequence.
    """
    layer, X = random_layer(full(base)), random_rows(10)[None]
    state = layer.new_state(batch_size=1)
    decoded = torch.cat([layer(row, state=state) for row in X.split(1, dim=1)], dim=1)
    mixed, plain = (
        state_bytes(MixerConfig.from_label(label, **SIZES), 10) for label in (full(base), f"{base}-cg-q")
    )
    return provided(far(decoded, layer(X)) <= 1e-9, float(mixed - plain))
