"""Routing: where the active set changes. Static mixing has flat boundaries, dynamic mixing curved ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from hypermlp.layers.internals import gate_parameters
from hypermlp.theory.check import check, far, largest, provided, size
from hypermlp.theory.objects import SIZES, Step, T, random_query, random_rows, random_step, times

STEP_SIZE = 1e-5  # of central differences


def static(base: str, rows: int = T) -> Step:
    """Return a step of one head with mixes but with nothing that depends on x."""
    return random_step(f"{base}-12o!", rows, static=True, num_heads=1)


def dynamic(base: str) -> Step:
    """Return a step of one head with mixes that depend on x."""
    return random_step(f"{base}-12o!", num_heads=1)


def boundary(step: Step, slot: int, plane: Tensor, places: Tensor) -> Tensor:
    """Return, for each place along a line, how far across the operator begins to activate the slot.

    ``plane`` ``[3, D]`` holds an origin and the directions along and across. Each distance is found by
    bisection between -8 and 8; all are NaN if the slot's state does not change between these.
    """
    origin, along, across = plane
    starts = origin + places[:, None] * along

    def state(distance: Tensor) -> Tensor:
        return step.active(starts + distance[:, None] * across)[:, slot]

    low, high = torch.full_like(places, -8.0), torch.full_like(places, 8.0)
    begins, ends = state(low), state(high)
    if (begins == ends).any():
        return torch.full_like(places, torch.nan)
    for _ in range(40):
        middle = (low + high) / 2
        beyond = state(middle) == ends
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return (low + high) / 2


def off_line(places: Tensor, curve: Tensor) -> float:
    """Return the largest distance of a curve from the straight line through its ends."""
    share = (places - places[0]) / (places[-1] - places[0])
    return far(curve, curve[0] + (curve[-1] - curve[0]) * share)


def bend(step: Step) -> float:
    """Return the largest distance of the boundaries of three slots, in four planes, from straight lines."""
    places = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
    planes = [random_rows(3, step.config.hidden_size, seed=20 + seed) for seed in range(4)]
    curves = (boundary(step, slot, plane, places) for plane in planes for slot in range(3))
    return largest(off_line(places, curve) for curve in curves if curve.isfinite().all())


def lines_within_cells(step: Step, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x and d for which the active set is not empty and the same at x - d, x and x + d.

    Raises ArithmeticError if these are not more than a quarter of the rows.
    """
    before, here, after = step.active(torch.stack([x - d, x, x + d]))
    stays = here.any(-1) & (before == here).all(-1) & (here == after).all(-1)
    if 4 * stays.sum() <= len(stays):
        raise ArithmeticError("too few lines lie within a cell")
    return x[stays], d[stays]


def second_difference(f: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> Tensor:
    """Return f(x - d) - 2 f(x) + f(x + d)."""
    return f(x - d) + f(x + d) - 2 * f(x)


def derivative(f: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> Tensor:
    """Return the central difference of f along the small move d, per ``STEP_SIZE``."""
    return (f(x + d) - f(x - d)) / (2 * STEP_SIZE)


def excess_rank(before: Tensor, after: Tensor, rank: int) -> float:
    """Return the (rank + 1)-th singular value of the change over the first one; NaN if there is no change."""
    values = torch.linalg.svdvals(after - before)
    return provided(bool(values[0] > 1e-3), float(values[rank] / values[0]))


@check("Theorem thm:polyhedral", "Corollary cor:warped_routing", within=0)
def static_mixing_is_polyhedral(base: str) -> float:
    """Static mixing: the partition is polyhedral.

    Measured: the number of slots, over 300 inputs, whose state in the operator is not the sign of x B with a
    fixed B.
    """
    step, queries = static(base), random_rows(300, seed=3)
    B = step.W1(random_query(seed=2))
    return float((step.active(queries) != (queries @ B > 0)).sum())


@check("Theorem thm:polyhedral", within=1e-6)
def static_boundaries_are_straight(base: str) -> float:
    """Static mixing: boundaries are straight.

    Measured: the largest distance of the operator's boundaries, in planes through x-space, from straight
    lines.
    """
    return bend(static(base))


@check("Theorem thm:polyhedral", "Remark rem:l2norm-breaks-cpwl", within=1e-9, bases="R")
def the_output_is_linear_on_a_cell(base: str) -> float:
    """On a cell the output is linear, up to the norm.

    Measured: the largest difference between the output and x A_s / rho, where the active set fixes A_s.
    """
    step, x = static(base), random_rows(50, seed=3)
    linear = times(x, step.W1(x), torch.diag_embed(step.active(x).double()), step.W2(x))
    return far(step.real(x), linear / step.rho(x))


@check("Remark rem:l2norm-breaks-cpwl", at_least=1e-3, bases="R")
def the_norm_breaks_linearity(base: str) -> float:
    """The norm breaks piecewise linearity.

    Measured: the largest second difference of the output along 50 lines within a cell, relative to the
    output; NaN if that of rho times the output is not zero.
    """
    step = static(base)
    x, d = lines_within_cells(step, random_rows(50, seed=3), 0.2 * random_rows(50, seed=4))
    bends = second_difference(step.real, x, d) / step.real(x).abs().amax(-1, keepdim=True)
    return provided(size(second_difference(step.real_unnormalised, x, d)) <= 1e-9, size(bends))


@check("Corollary cor:R-static", within=0)
def diagonal_mixing_keeps_the_partition(base: str) -> float:
    """A diagonal R1 does not move the hyperplanes.

    Measured: the number of slots, over 300 inputs, that are active with a positive diagonal mix but not
    without mixing, or the reverse.
    """
    step, queries = static(base), random_rows(300, seed=3)
    mix = step.layer.mix1
    assert mix is not None
    mix.left.zero_()
    mix.diag.copy_(random_rows(1, SIZES["max_length"], seed=6).abs().expand_as(mix.diag))
    with_diagonal = step.active(queries)
    mix.diag.zero_()
    return float((with_diagonal != step.active(queries)).sum())


@check("Proposition prop:impC_static", "Corollary cor:R-static", within=1e-6)
def static_mixing_mixes_normals(base: str) -> float:
    """Off the diagonal, R1 mixes the normals.

    Measured: the largest difference between the gradient of the operator's h, slot by slot, and the base
    normals L1 Xᵀ combined by the columns of R1.
    """
    step = static(base)
    axes = torch.eye(step.config.hidden_size, dtype=torch.float64)[::5]
    points, moves = random_rows(20, seed=3).repeat_interleave(len(axes), 0), axes.repeat(20, 1)
    x, d = lines_within_cells(step, points, STEP_SIZE * moves)
    normals = times(d / STEP_SIZE, step.L1(x), step.X1.T, step.R(x, 1)) * step.active(x)
    return far(derivative(step.real_h, x, d), normals)


@check("Theorem thm:warped", "Proposition prop:impC_dynamic", "Corollary cor:warped_routing", at_least=1e-2)
def dynamic_boundaries_are_curved(base: str) -> float:
    """Dynamic mixing bends the boundaries.

    Measured: the largest distance of the operator's boundaries, in planes through x-space, from straight
    lines.
    """
    return bend(dynamic(base))


@check("Theorem thm:warped", within=0)
def the_partition_is_the_pullback_of_orthants(base: str) -> float:
    """The active set changes only where some h is zero.

    Measured: the number of slots, along four lines, whose state in the operator changes without a change of
    the sign of h, or the reverse; NaN if there are no changes.
    """
    step, places = dynamic(base), torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    lines = random_rows(4, seed=3)[:, None] + places * random_rows(4, seed=4)[:, None]  # [4, 60, D]
    states = (step.active(lines), step.h(lines) > 0)
    changed, expected = (state[:, 1:] != state[:, :-1] for state in states)
    return provided(int(changed.sum()) > 5, float((changed != expected).sum()))


@check("Proposition prop:differential", within=1e-5)
def the_differential_has_three_terms(base: str) -> float:
    """Three terms move the boundaries: the differential of h.

    Measured: the largest difference between the slope of the operator's h and dx L X R + x dL X R + x L X dR,
    relative to the latter.
    """
    step = random_step(f"{base}-g-q-12o", num_heads=1)
    x, d = lines_within_cells(step, random_rows(20, seed=3), STEP_SIZE * random_rows(20, seed=4))
    L, X, R, dx = step.L1(x), step.X1.T, step.R(x, 1), d / STEP_SIZE
    dL, dR = derivative(step.L1, x, d), derivative(lambda y: step.R(y, 1), x, d)
    terms = times(dx, L, X, R) + times(x, dL, X, R) + times(x, L, X, dR)
    differences = derivative(step.real_h, x, d) - terms * step.active(x)
    return size(differences / terms.abs().amax(-1, keepdim=True))


@check("Remark rem:lowrank", "Remark rem:impC_lowrank", within=1e-9)
def the_deformation_has_low_rank(base: str) -> float:
    """The deformation has low rank.

    Measured: the (rank + 1)-th singular value of the change that other gates of R2 make in the operator's
    weights, relative to the first one; NaN if nothing changes.
    """
    step, queries = static(base, rows=12), random_rows(12, seed=3)
    gate = gate_parameters(step.layer)[1]["mix2"]
    before = step.real_weights(queries)[:, 0]
    gate += random_rows(1, len(gate), seed=5)[0]
    return excess_rank(before, step.real_weights(queries)[:, 0], step.config.rank)
