"""What the mixes cost: thin products, no matrix of slots by slots, no state of their own."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import core_flops, flops_table, state_bytes
from hypermlp.theory.check import check, far, largest, provided
from hypermlp.theory.objects import SIZES, full, random_layer, random_rows, random_step

LARGER: dict[str, Any] = SIZES | {
    "hidden_size": 32
}  # the FLOP counter leaves out products with a dimension of 1


@check("Lemma lem:app_cost_vec_dplr", within=1e-9)
def a_mix_is_two_thin_products(base: str) -> float:
    """Vector times DPLR.

    Measured: the largest difference between the operator's weights with the second mix and those without,
    times R2ᵀ, both written out and as two thin products.
    """
    step = random_step(full(base))
    x = step.newest

    def difference(head: int) -> float:
        mixed, y = step.real_weights(x)[head], step.real_activation(x)[head]
        parts = step.dplr(x, 2, head)
        assert parts is not None
        p, A, s, B = parts
        thin = y * (1 + p) + ((y @ B) * s) @ A.T
        return largest([far(mixed, y @ step.R(x, 2, head).T), far(mixed, thin)])

    return largest(map(difference, range(step.config.num_heads)))


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
