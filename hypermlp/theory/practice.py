"""What the view says of prompts, slots, registers, linear attention and noise."""

import torch

from hypermlp.theory.check import check, largest
from hypermlp.theory.memory import alpha, pool, readout
from hypermlp.theory.mlp import T, far, full
from hypermlp.theory.objects import Step, attend, random_layer, random_rows


@check(
    "A prompt adds to the pool",
    where="Proposition prop:imp1_additive_pool",
    says="difference of the outputs with and without a document in front, against rescaling of the old atoms plus the new ones",
    within=1e-9,
    bases=("R",),
)
def a_prompt_adds_to_the_pool(base: str) -> float:
    layer, x = random_layer(base, num_heads=1), random_rows(1, seed=5)[0]
    old, new = random_rows(5, seed=2), random_rows(4, seed=3)
    alone, added, both = (Step(layer, X) for X in (old, new, torch.cat([new, old])))

    def positive(step: Step) -> torch.Tensor:
        mu = pool(step, x)
        return readout(step, x, mu.restricted((alpha(step, x, mu.u) > 0).double()))

    rho_both, rho_alone = (step.rho(step.h(x, 0)) for step in (both, alone))
    expected = (1 / rho_both - 1 / rho_alone) * positive(alone) + positive(added) / rho_both
    return far(both.real(x) - alone.real(x), expected)


@check(
    "Slots are combinations of the whole context",
    where="Proposition prop:imp2_slots_global, Theorem thm:core_dynamic_head (iii)",
    says="addresses that the operator gives active slots against those of sums of rows with the columns of R1",
    within=1e-9,
)
def slots_are_made_of_the_whole_context(base: str) -> float:
    X = random_rows(T)
    step, x = Step(random_layer(full(base)), X), X[-1]
    worst = 0.0
    for head, weights in enumerate(step.real_weights(x, mixed=False)):
        R = step.R(x, 1, head)
        slots = torch.stack([sum(R[j, i] * step.X1[j] for j in range(T)) for i in range(T)])  # type: ignore[misc]
        addressed = weights / (step.strength(x, head)) * step.rho(step.h(x, head))
        worst = largest(worst, far(addressed, alpha(step, x, slots, head).clamp(min=0)))
    return worst


@check(
    "Every slot sees every row",
    where="Proposition prop:imp2_slots_global",
    says="pairs of a slot and a row that it depends on in the operator with mixing, over all; 0 if also without",
    at_least=1.0,
)
def every_slot_sees_every_row(base: str) -> float:
    shares = []
    for label in (f"{base}-12o!", base):
        layer, X = random_layer(label, num_heads=1, static=True), random_rows(T)
        depends = torch.zeros(T, T, dtype=torch.bool)
        for x in random_rows(60, seed=3):
            h = Step(layer, X).h(x, 0)
            base_line = Step(layer, X).real_weights(x, mixed=False)[0] * Step(layer, X).rho(h)
            for row in range(T):
                moved = X.clone()
                moved[T - 1 - row] += 0.01 * random_rows(1, seed=7)[0]  # slots are newest first
                step = Step(layer, moved)
                change = step.real_weights(x, mixed=False)[0] * step.rho(step.h(x, 0)) - base_line
                depends[row] |= change.abs() > 1e-9
            if depends.all():
                break
        shares.append(float(depends.double().mean()))
    return shares[0] if shares[1] == 1 / T else 0.0


@check(
    "Registers enlarge the pool",
    where="Proposition prop:imp3_registers_nomix",
    says="rho times the output of a layer with 3 registers against rho times that without, plus the registers' own readout",
    within=1e-9,
)
def registers_are_atoms_of_the_pool(base: str) -> float:
    layer, X = random_layer(base, num_heads=1, num_registers=3), random_rows(6, seed=2)
    x, registers = X[-1], layer.registers
    assert registers is not None
    plain, only, augmented = (Step(layer, rows) for rows in (X, registers, torch.cat([registers, X])))
    outputs = plain.real(x), only.real(x), layer(X[None])[0, -1]
    pools = [
        step.rho(step.h(x, 0)) * output
        for step, output in zip((plain, only, augmented), outputs, strict=True)
    ]
    return far(pools[0] + pools[1], pools[2])


@check(
    "Registers are mixed like the context",
    where="Remark rem:imp3_registers_mix",
    says="a layer with 3 registers and mixing against the paper's objects over registers and context; not a number if they change nothing",
    within=1e-9,
)
def registers_are_mixed_like_rows(base: str) -> float:
    layer, X = random_layer(f"{base}-g-q-12o", num_registers=3), random_rows(6, seed=2)
    registers = layer.registers
    assert registers is not None
    output = layer(X[None])[0, -1]
    without = far(output, Step(layer, X).o(X[-1]))
    return far(output, Step(layer, torch.cat([registers, X])).o(X[-1])) if without > 1e-3 else float("nan")


@check(
    "Without activation the whole pool is read",
    where="Proposition prop:impE_linear_no_prune",
    says="the operator of x less that of -x, which has no activation, against the signed readout of the whole pool",
    within=1e-9,
    bases=("R",),
)
def linear_attention_reads_the_whole_pool(base: str) -> float:
    step, x = (
        Step(random_layer(f"{base}-12o!", static=True, num_heads=1), random_rows(T)),
        random_rows(1, seed=5)[0],
    )
    linear = step.real(x) - step.real(-x)  # relu(z) - relu(-z) = z
    used = step.real_weights(x, mixed=False)[0] - step.real_weights(-x, mixed=False)[0]
    if not (used != 0).all():
        return float("nan")
    return far(linear, readout(step, x, pool(step, x)) / step.rho(step.h(x, 0)))


@check(
    "Noise activates half of its slots",
    where="Proposition prop:app_spurious_activation",
    says="slots of 12 rows of noise that the operator activates, mean of 4000 draws, over 6: distance from 1; or share of wrong ones",
    within=0.02,
)
def noise_activates_half_of_its_slots(base: str) -> float:
    rows, draws = 12, 4000
    layer, x = random_layer(base, num_heads=1), random_rows(1, seed=5)[0]
    noise = random_rows(draws * rows, seed=6).view(draws, rows, -1)
    config = layer.config
    k = layer.k_proj(noise).unflatten(-1, (config.num_branches, config.qk_dim))
    q = layer.q_proj(x).view(1, 1, config.num_branches, config.qk_dim).expand(draws, -1, -1, -1)
    values = torch.eye(rows, dtype=x.dtype).view(1, rows, 1, rows).expand(draws, -1, -1, -1)
    active = attend(q, k, values, None, None, activation=config.activation)[:, 0, 0] > 0
    scores = torch.einsum("bd,btd->bt", q[:, 0, 0], k[:, :, 0])
    wrong = float((active != (scores > 0)).double().mean())
    return largest(wrong, abs(float(active.sum(-1).double().mean()) / (rows / 2) - 1))
