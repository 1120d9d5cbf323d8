"""Routing: where the active set changes. Hyperplanes under static mixing, curved surfaces under dynamic mixing."""

import itertools

import torch
from torch import Tensor

from hypermlp.ops.arguments import Mix
from hypermlp.theory.check import check, largest
from hypermlp.theory.mlp import T, far
from hypermlp.theory.objects import Step, attend, random_layer, random_rows


def pattern(step: Step, x: Tensor) -> Tensor:
    """Which slots of the first head the operator activates."""
    return step.real_weights(x, mixed=False)[0] > 0


def unnormalised(step: Step, x: Tensor) -> Tensor:
    """h of the first head, as far as the operator shows it: where it is positive."""
    return step.real_weights(x, mixed=False)[0] / step.strength(x, 0) * step.rho(step.h(x, 0))


def static(base: str, **settings: int) -> Step:
    """Mixing, but nothing that depends on x."""
    return Step(random_layer(f"{base}-12o!", static=True, num_heads=1, **settings), random_rows(T))


def dynamic(base: str) -> Step:
    return Step(random_layer(f"{base}-12o!", num_heads=1), random_rows(T))


def boundary(step: Step, slot: int, origin: Tensor, along: Tensor, across: Tensor, places: Tensor) -> Tensor:
    """Where, going across at each place along, the operator begins to activate the slot; by bisection."""
    found = []
    for place in places:
        start = origin + place * along
        low, high = -8.0, 8.0
        if pattern(step, start + low * across)[slot] == pattern(step, start + high * across)[slot]:
            return places.new_full((len(places),), torch.nan)
        rising = bool(pattern(step, start + high * across)[slot])
        for _ in range(40):
            middle = (low + high) / 2
            if bool(pattern(step, start + middle * across)[slot]) == rising:
                high = middle
            else:
                low = middle
        found.append((low + high) / 2)
    return places.new_tensor(found)


def bend(step: Step) -> float:
    """How far the boundaries of the slots are from straight lines, in planes through x-space; the largest."""
    places = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
    worst = float("nan")
    for seed in range(4):
        origin, along, across = random_rows(3, step.config.hidden_size, seed=20 + seed)
        for slot in range(3):
            found = boundary(step, slot, origin, along, across, places)
            if found.isfinite().all():
                straight = found[0] + (found[-1] - found[0]) * (places - places[0]) / (places[-1] - places[0])
                apart = far(found, straight)
                worst = apart if worst != worst else largest(worst, apart)
    return worst


@check(
    "Static mixing: the partition is polyhedral",
    where="Theorem thm:polyhedral, Corollary cor:warped_routing",
    says="active sets of the operator that are not the signs of x B, B fixed, over 300 inputs",
    within=0,
)
def static_mixing_is_polyhedral(base: str) -> float:
    step = static(base)
    B = step.W1(random_rows(1, seed=2)[0], 0)
    return float(sum(int((pattern(step, x) != (x @ B > 0)).sum()) for x in random_rows(300, seed=3)))


@check(
    "Static mixing: boundaries are straight",
    where="Theorem thm:polyhedral",
    says="how far the operator's boundaries in planes through x-space are from lines",
    within=1e-6,
)
def static_boundaries_are_straight(base: str) -> float:
    return bend(static(base))


@check(
    "On a cell the output is linear, up to the norm",
    where="Theorem thm:polyhedral, Remark rem:l2norm-breaks-cpwl",
    says="the output against x A_s / rho, A_s fixed by the active set",
    within=1e-9,
    bases=("R",),
)
def the_output_is_linear_on_a_cell(base: str) -> float:
    step = static(base)
    worst = 0.0
    for x in random_rows(50, seed=3):
        A = step.W1(x, 0) @ torch.diag(pattern(step, x).double()) @ step.W2(x, 0)
        worst = largest(worst, far(step.real(x), x @ A / step.rho(step.h(x, 0))))
    return worst


@check(
    "The norm breaks piecewise linearity",
    where="Remark rem:l2norm-breaks-cpwl",
    says="second difference of the output within a cell, over the output: the largest of 50",
    at_least=1e-3,
    bases=("R",),
)
def the_norm_breaks_linearity(base: str) -> float:
    step, worst = static(base), 0.0
    for x, direction in zip(random_rows(50, seed=3), random_rows(50, seed=4), strict=True):
        points = [x - 0.2 * direction, x, x + 0.2 * direction]
        patterns = [pattern(step, point) for point in points]
        if torch.equal(patterns[0], patterns[1]) and torch.equal(patterns[1], patterns[2]):
            before, here, after = (step.real(point) for point in points)
            scaled = [step.rho(step.h(point, 0)) * step.real(point) for point in points]
            if far(scaled[0] + scaled[2], 2 * scaled[1]) > 1e-9:
                return float("nan")
            worst = largest(worst, far(before + after, 2 * here) / float(here.abs().max()))
    return worst


@check(
    "A diagonal R1 leaves the hyperplanes where they are",
    where="Corollary cor:R-static",
    says="active sets that differ between positive diagonals and no mixing at all, over 300 inputs",
    within=0,
)
def diagonal_mixing_keeps_the_partition(base: str) -> float:
    step, plain = static(base), static(base)
    for each, p in ((step, random_rows(1, 16, seed=6).abs()), (plain, torch.zeros(1, 16))):
        assert each.layer.mix1 is not None
        each.layer.mix1.left.zero_()
        each.layer.mix1.diag.copy_(p.expand_as(each.layer.mix1.diag))
    return float(sum(int((pattern(step, x) != pattern(plain, x)).sum()) for x in random_rows(300, seed=3)))


@check(
    "Off the diagonal, R1 mixes the normals",
    where="Proposition prop:impC_static, Corollary cor:R-static",
    says="gradient of the operator's h, slot by slot, against the sum of base normals with the columns of R1",
    within=1e-6,
)
def static_mixing_mixes_normals(base: str) -> float:
    step, size, worst, seen = static(base), 1e-5, 0.0, 0
    for x in random_rows(20, seed=3):
        normals = step.L1(x, 0) @ step.X1.T @ step.R(x, 1, 0)
        on = pattern(step, x)
        for axis in range(0, len(x), 5):
            moved = torch.zeros_like(x)
            moved[axis] = size
            if torch.equal(pattern(step, x + moved), on) and torch.equal(pattern(step, x - moved), on):
                slope = (unnormalised(step, x + moved) - unnormalised(step, x - moved)) / (2 * size)
                worst, seen = (
                    largest(worst, far(slope[on], normals[axis][on])) if on.any() else worst,
                    seen + 1,
                )
    return worst if seen > 20 else float("nan")


@check(
    "Dynamic mixing bends the boundaries",
    where="Theorem thm:warped, Proposition prop:impC_dynamic, Corollary cor:warped_routing",
    says="how far the operator's boundaries in planes through x-space are from lines, the largest",
    at_least=1e-2,
)
def dynamic_boundaries_are_curved(base: str) -> float:
    return bend(dynamic(base))


@check(
    "The active set changes only where some h is zero",
    where="Theorem thm:warped",
    says="changes of the operator's active set along lines that no change of a sign of h explains",
    within=0,
)
def the_partition_is_the_pullback_of_orthants(base: str) -> float:
    step, wrong, changes = dynamic(base), 0, 0
    for x, direction in zip(random_rows(4, seed=3), random_rows(4, seed=4), strict=True):
        line = [x + s * direction for s in torch.linspace(-2, 2, 60, dtype=x.dtype)]
        for one, other in itertools.pairwise(line):
            changed = pattern(step, one) != pattern(step, other)
            signs = (step.h(one, 0) > 0) != (step.h(other, 0) > 0)
            wrong += int((changed != signs).sum())
            changes += int(changed.sum())
    return float(wrong) if changes > 5 else float("nan")


@check(
    "What moves the boundaries: the differential of h",
    where="Proposition prop:differential",
    says="slope of the operator's h against dx L X R + x dL X R + x L X dR, relative",
    within=1e-5,
)
def the_differential_has_three_terms(base: str) -> float:
    step = Step(random_layer(f"{base}-g-q-12o", num_heads=1), random_rows(T))
    size, worst, seen = 1e-5, 0.0, 0
    for x, dx in zip(random_rows(20, seed=3), random_rows(20, seed=4), strict=True):
        ahead, behind = x + size * dx, x - size * dx
        on = pattern(step, x)
        if (
            not on.any()
            or not torch.equal(pattern(step, ahead), on)
            or not torch.equal(pattern(step, behind), on)
        ):
            continue
        dL = (step.L1(ahead, 0) - step.L1(behind, 0)) / (2 * size)
        dR = (step.R(ahead, 1, 0) - step.R(behind, 1, 0)) / (2 * size)
        L, R, X = step.L1(x, 0), step.R(x, 1, 0), step.X1.T
        terms = dx @ L @ X @ R + x @ dL @ X @ R + x @ L @ X @ dR
        slope = (unnormalised(step, ahead) - unnormalised(step, behind)) / (2 * size)
        worst, seen = largest(worst, far(slope[on], terms[on]) / float(terms.abs().max())), seen + 1
    return worst if seen > 5 else float("nan")


@check(
    "The deformation has low rank",
    where="Remark rem:lowrank, Remark rem:impC_lowrank",
    says="rank + 1st singular value of what other gates of R2 change in the operator's weights, over the first",
    within=1e-9,
)
def the_deformation_has_low_rank(base: str) -> float:
    t, rank, branches = 12, 3, 2 if base == "G" else 1
    q, k = (random_rows(t, 4 * branches, seed=seed).view(1, t, branches, 4) for seed in (3, 4))
    mix = random_layer(f"{base}-12o!", num_heads=1).mix2
    assert mix is not None
    values = torch.eye(t, dtype=torch.float64).view(1, t, 1, t)
    weights = []
    for seed in (5, 6):
        gate = random_rows(1, rank, seed=seed).sigmoid().view(1, 1, 1, rank)
        mixed = Mix(mix.diag, mix.left, mix.right, gate)
        activation = "glu" if base == "G" else "relu"
        rows = [
            attend(q[:, i : i + 1], k, values, None, mixed, activation=activation)[0, 0, 0] for i in range(t)
        ]
        weights.append(torch.stack(rows))
    values_found = torch.linalg.svdvals(weights[1] - weights[0])
    return float(values_found[rank] / values_found[0]) if values_found[0] > 1e-3 else float("nan")
