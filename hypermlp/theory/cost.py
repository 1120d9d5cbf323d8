"""What the mixes cost: thin products, no matrix of slots by slots, no state of their own."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import core_flops, flops_table, state_bytes
from hypermlp.theory.check import check, largest
from hypermlp.theory.mlp import T, far, full
from hypermlp.theory.objects import SIZES, Step, random_layer, random_rows


@check(
    "Vector times DPLR",
    where="Lemma lem:app_cost_vec_dplr",
    says="the operator's weights with the second mix against those without, times R2ᵀ written out and times its two thin factors",
    within=1e-9,
)
def a_mix_is_two_thin_products(base: str) -> float:
    X = random_rows(T)
    step, x = Step(random_layer(full(base)), X), X[-1]
    plain, mixed, mix = step.real_weights(x, mixed=False), step.real_weights(x), step.layer.mix2
    assert mix is not None
    worst = 0.0
    for head in range(step.config.num_heads):
        y, s = plain[head], step.gates(x).mix2[head]
        p, A, B = (parameter[head, :T] for parameter in (mix.diag, mix.left, mix.right))
        thin = y * (1 + p) + ((y @ B) * s) @ A.T
        worst = largest(worst, far(mixed[head], y @ step.R(x, 2, head).T), far(mixed[head], thin))
    return worst


LARGER: dict[str, Any] = SIZES | {"hidden_size": 32}  # a product with a dimension of 1 is not counted as one


def counted(base: str, t: int) -> float:
    """FLOPs of the operator's definition for one query over t rows."""
    step = Step(random_layer(full(base), **LARGER), random_rows(t, LARGER["hidden_size"]))
    operands, values = step.operands(random_rows(1, LARGER["hidden_size"], seed=2)[0]), step.values()
    with FlopCounterMode(display=False) as counter:
        step.attend(*operands, values, backend="reference")
    return float(counter.get_total_flops())


@check(
    "A step costs O(t (d_qk + d_vo + r))",
    where="Proposition prop:app_cost_infer, Proposition prop:core_cost_short",
    says="FLOPs counted in the operator's definition over 2 t (qk + vo + 2 r (branches + heads)): distance from 1, the largest",
    within=0,
)
def a_step_costs_what_it_should(base: str) -> float:
    config = MixerConfig.from_label(full(base), **LARGER)
    worst = 0.0
    for t in (2, 5, 11, 16):
        formula = (
            2
            * t
            * (config.qk_width + config.vo_width + 2 * config.rank * (config.num_branches + config.num_heads))
        )
        worst = largest(
            worst, abs(counted(base, t) / formula - 1), abs(core_flops(config, 1, t) / formula - 1)
        )
    return worst


@check(
    "Training costs O(T² r) more than attention",
    where="Proposition prop:app_cost_train",
    says="what mixing adds over steps 2 to T, counted in the definition, against 4 r (branches + heads) (2 + ... + T)",
    within=0,
)
def training_overhead_is_quadratic_times_rank(base: str) -> float:
    config = MixerConfig.from_label(full(base), **LARGER)
    length, matrices = 12, config.num_branches + config.num_heads
    mixing = sum(counted(base, t) - 2 * t * (config.qk_width + config.vo_width) for t in range(2, length + 1))
    pairs = length * (length + 1) // 2
    table = flops_table(config, length)
    per_pair = 4 * config.rank * matrices
    return largest(
        abs(mixing / (per_pair * (pairs - 1)) - 1),
        abs((table["mix1"] + table["mix2"]) / (per_pair * pairs) - 1),
    )


@check(
    "Mixing keeps no state",
    where="Proposition prop:app_cost_infer",
    says="bytes of decoding state of the layer beyond those without mixing, after 10 rows; not a number if decoding differs",
    within=0,
)
def mixing_keeps_no_state(base: str) -> float:
    with_mixing, without = (MixerConfig.from_label(label, **SIZES) for label in (full(base), f"{base}-cg-q"))
    layer, X = random_layer(full(base)), random_rows(10)[None]
    state = layer.new_state(batch_size=1)
    decoded = torch.cat([layer(X[:, i : i + 1], state=state) for i in range(10)], dim=1)
    if not far(decoded, layer(X)) <= 1e-9:
        return float("nan")
    return float(state_bytes(with_mixing, 10) - state_bytes(without, 10))
