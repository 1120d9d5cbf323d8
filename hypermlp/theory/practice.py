"""Consequences for prompts, slots, registers, linear attention and noise."""

import torch

from hypermlp.theory.check import check, far, largest, provided
from hypermlp.theory.geometry import static
from hypermlp.theory.memory import activated, alpha, pool, readout
from hypermlp.theory.objects import (
    Step,
    T,
    attend,
    full,
    random_layer,
    random_query,
    random_rows,
    random_step,
)


@check("Proposition prop:imp1_additive_pool", within=1e-9, bases="R")
def a_prompt_adds_to_the_pool(base: str) -> float:
    """A prompt adds to the pool.

    Measured: the largest difference between what a document in front changes in the output and the rescaled
    old atoms plus the new ones.
    """
    layer, x = random_layer(base, num_heads=1), random_query(seed=5)
    old, new = random_rows(5, seed=2), random_rows(4, seed=3)
    alone, added, both = (Step(layer, X) for X in (old, new, torch.cat([new, old])))
    old_atoms, new_atoms = (readout(step, x, activated(step, x, pool(step, x))) for step in (alone, added))
    expected = (1 / both.rho(x) - 1 / alone.rho(x)) * old_atoms + new_atoms / both.rho(x)
    return far(both.real(x) - alone.real(x), expected)


@check("Proposition prop:imp2_slots_global", "Theorem thm:core_dynamic_head (iii)", within=1e-9)
def slots_are_made_of_the_whole_context(base: str) -> float:
    """Slots are combinations of the whole context.

    Measured: the largest difference between the addresses that the operator gives active slots and those of
    the rows of context, summed with the columns of R1.
    """
    step = random_step(full(base))
    x = step.newest

    def difference(head: int) -> float:
        slots = torch.einsum("ji,jd->id", step.R(x, 1, head), step.X1)
        return far(step.real_h(x, head), alpha(step, x, slots, head).clamp(min=0))

    return largest(map(difference, range(step.config.num_heads)))


@check("Proposition prop:imp2_slots_global", at_least=1.0)
def every_slot_sees_every_row(base: str) -> float:
    """Every slot sees every row.

    Measured: with mixing, the share of the pairs of a slot and a row such that the slot depends on the row in
    the operator; NaN unless without mixing every slot depends on one row alone.
    """

    def dependence(label: str) -> float:
        layer, X = random_layer(label, num_heads=1, static=True), random_rows(T)
        nudges = 0.01 * torch.eye(T, dtype=X.dtype)[:, :, None] * random_query(seed=7)  # of one row each
        queries = random_rows(20, seed=3)
        moved = torch.stack([Step(layer, X + nudge).real_h(queries) for nudge in nudges])
        depends = (moved - Step(layer, X).real_h(queries)).abs() > 1e-9  # [row, query, slot]
        return float(depends.any(1).double().mean())

    return provided(dependence(base) == 1 / T, dependence(f"{base}-12o!"))


@check("Proposition prop:imp3_registers_nomix", within=1e-9)
def registers_are_atoms_of_the_pool(base: str) -> float:
    """Registers enlarge the pool.

    Measured: the largest difference between rho o of a layer with 3 registers and rho o of the same layer
    without them plus that of the registers alone.
    """
    layer, X = random_layer(base, num_heads=1, num_registers=3), random_rows(6, seed=2)
    x, registers = X[-1], layer.registers
    assert registers is not None
    plain, only = (Step(layer, rows).real_unnormalised(x) for rows in (X, registers))
    augmented = Step(layer, torch.cat([registers, X])).rho(x) * layer(X[None])[0, -1]
    return far(plain + only, augmented)


@check("Remark rem:imp3_registers_mix", within=1e-9)
def registers_are_mixed_like_rows(base: str) -> float:
    """Registers are mixed like the context.

    Measured: the largest difference between a layer with 3 registers and mixing and the paper's formula over
    registers and context; NaN if the formula over the context alone gives the same.
    """
    layer, X = random_layer(f"{base}-g-q-12o", num_registers=3), random_rows(6, seed=2)
    assert layer.registers is not None
    output = layer(X[None])[0, -1]
    with_registers, without = (
        far(output, Step(layer, rows).o(X[-1])) for rows in (torch.cat([layer.registers, X]), X)
    )
    return provided(without > 1e-3, with_registers)


@check("Proposition prop:impE_linear_no_prune", within=1e-9, bases="R")
def linear_attention_reads_the_whole_pool(base: str) -> float:
    """Without activation the whole pool is read.

    Measured: the largest difference between the operator at x minus the operator at -x, which has no
    activation because relu(z) - relu(-z) = z, and the signed readout of the whole pool; NaN if a slot is not
    read.
    """
    step, x = static(base), random_query(seed=5)
    linear, used = step.real(x) - step.real(-x), step.real_activation(x) - step.real_activation(-x)
    return provided(bool((used != 0).all()), far(linear, readout(step, x, pool(step, x)) / step.rho(x)))


@check("Proposition prop:app_spurious_activation", within=0.02)
def noise_activates_half_of_its_slots(base: str) -> float:
    """Noise activates half of its slots.

    Measured: the larger of two numbers: the distance from 1 of the mean number of 12 rows of noise that the
    operator activates, over 6, in 4000 draws; the share of slots whose state is not the sign of the score.
    """
    rows, draws = 12, 4000
    layer, x = random_layer(base, num_heads=1), random_query(seed=5)
    branches = (layer.config.num_branches, layer.config.qk_dim)
    k = layer.k_proj(random_rows(draws * rows, seed=6)).view(draws, rows, *branches)
    q = layer.q_proj(x).view(1, 1, *branches)
    values = torch.eye(rows, dtype=x.dtype).view(1, rows, 1, rows)
    active = attend(q, k, values, activation=layer.config.activation)[:, 0, 0] > 0
    wrong = float((active != (k[:, :, 0] @ q[0, 0, 0] > 0)).double().mean())
    return largest([wrong, abs(float(active.double().mean()) / 0.5 - 1)])
