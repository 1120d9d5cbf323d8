"""Memory: a pool of slots instantiated from the context, of which the signs activate some."""

import torch
from torch import Tensor

from hypermlp.theory.check import check, largest
from hypermlp.theory.mlp import T, far, full
from hypermlp.theory.objects import Step, random_layer, random_rows


class Measure:
    """Masses on atoms (u, v): a finite signed measure."""

    def __init__(self, u: Tensor, v: Tensor, mass: Tensor):
        self.u, self.v, self.mass = u, v, mass

    def restricted(self, gate: Tensor) -> "Measure":
        return Measure(self.u, self.v, self.mass * gate)

    @property
    def total_variation(self) -> float:
        return float(self.mass.abs().sum())

    def merged(self) -> "Measure":
        """Equal atoms become one with the sum of their masses."""
        atoms, index = torch.unique(torch.cat([self.u, self.v], dim=1), dim=0, return_inverse=True)
        mass = torch.zeros(len(atoms), dtype=self.mass.dtype).index_add(0, index, self.mass)
        u, v = atoms.split(self.u.shape[1], dim=1)
        return Measure(u, v, mass)


def pool(step: Step, x: Tensor, head: int = 0) -> Measure:
    """A unit mass on every slot: rows of U = R1ᵀ X and V = R2ᵀ X."""
    return Measure(
        step.R(x, 1, head).T @ step.X1, step.R(x, 2, head).T @ step.X2, torch.ones(step.t, dtype=x.dtype)
    )


def alpha(step: Step, x: Tensor, u: Tensor, head: int = 0) -> Tensor:
    """How far each atom is addressed."""
    return u @ (x @ step.L1(x, head))


def readout(step: Step, x: Tensor, mu: Measure, strength: Tensor | float = 1.0, head: int = 0) -> Tensor:
    """The integral of alpha beta over a measure, without the norm."""
    return (mu.mass * strength * alpha(step, x, mu.u, head)) @ (mu.v @ step.L2T(x, head))


def active(step: Step, x: Tensor, mu: Measure) -> Measure:
    return mu.restricted((alpha(step, x, mu.u) > 0).double())


def one_head(base: str, *, mixing: bool = True, t: int = T, seed: int = 0) -> tuple[Step, Tensor]:
    """A step of a single head, with or without mixing along the sequence, and its newest row."""
    X = random_rows(t, seed=seed + 1)
    return Step(random_layer(full(base) if mixing else base, num_heads=1, seed=seed), X), X[-1]


@check(
    "Three-stage memory: pool, activated memory, readout",
    where="Theorem thm:three-stage-memory-multistage-pruning, Theorem thm:core_dynamic_head (ii)",
    says="the output against the readout of the activated slots over rho",
    within=1e-9,
)
def the_output_is_a_readout_of_activated_memory(base: str) -> float:
    step, x = one_head(base)
    return far(
        step.real(x),
        readout(step, x, active(step, x, pool(step, x)), step.strength(x, 0)) / step.rho(step.h(x, 0)),
    )


@check(
    "Dictionary-measure decomposition",
    where="Proposition prop:mech-measure-readout",
    says="the output against the integral of alpha+ beta over the whole pool",
    within=1e-9,
)
def the_output_is_an_integral_over_the_pool(base: str) -> float:
    step, x = one_head(base)
    mu = pool(step, x)
    positive = (alpha(step, x, mu.u).clamp(min=0) * step.strength(x, 0)) @ (mu.v @ step.L2T(x, 0))
    return far(step.real(x), positive / step.rho(step.h(x, 0)))


@check(
    "The pool is the pushforward of counting",
    where="Lemma lem:mech-pushforward",
    says="the output for a context with repeated rows against a measure in which equal atoms were merged",
    within=1e-9,
    bases=("R",),  # HyperGLU's strength belongs to a slot, not to an atom
)
def equal_slots_add_up(base: str) -> float:
    rows = random_rows(3)
    X = rows[torch.tensor([0, 1, 0, 2, 2, 0, 1])]
    step, x = Step(random_layer(base, num_heads=1), X), random_rows(1, seed=5)[0]
    mu = pool(step, x).merged()
    if sorted(mu.mass.tolist()) != [2.0, 2.0, 3.0]:
        return float("nan")
    return far(step.real(x), readout(step, x, active(step, x, mu)) / step.rho(step.h(x, 0)))


@check(
    "Activation contracts total variation",
    where="Theorem thm:tv-contraction-reachable, Lemma lem:mech-tv-contraction",
    says="mass of what the operator activates over that of the pool, largest of 200 inputs, also with signed masses",
    within=1.0,
)
def activation_contracts_total_variation(base: str) -> float:
    step, _ = one_head(base)
    worst = 0.0
    for x, masses in zip(random_rows(200, seed=2), random_rows(200, T, seed=3), strict=True):
        gate = (step.real_weights(x, mixed=False)[0] > 0).double()
        mu = pool(step, x)
        for measure in (mu, Measure(mu.u, mu.v, masses)):
            worst = largest(worst, measure.restricted(gate).total_variation / measure.total_variation)
        if gate.sum() != active(step, x, mu).total_variation:
            return float("nan")
    return worst


@check(
    "Total variation counts slots",
    where="Remark rem:mech-tv-atomic",
    says="mass of the activated measure minus the number of slots that the operator activates, largest of 200 inputs",
    within=0,
)
def total_variation_counts_slots(base: str) -> float:
    step, _ = one_head(base)
    return max(
        abs(
            active(step, x, pool(step, x)).total_variation
            - float((step.real_weights(x, mixed=False)[0] > 0).sum())
        )
        for x in random_rows(200, seed=2)
    )


@check(
    "Reachable atoms are bounded",
    where="Lemma lem:reachable-compact",
    says="an atom's address in the operator, |h| where it is active, over |x| |L1| |R1| |X|, largest of 200 inputs",
    within=1.0,
)
def reachable_atoms_are_bounded(base: str) -> float:
    step, _ = one_head(base)
    worst = 0.0
    for x in random_rows(200, seed=2):
        addressed = step.real_weights(x, mixed=False)[0] / step.strength(x, 0) * step.rho(step.h(x, 0))
        norms = [torch.linalg.matrix_norm(each, 2) for each in (step.L1(x, 0), step.R(x, 1, 0))]
        worst = largest(worst, float(addressed.max() / (x.norm() * norms[0] * norms[1] * step.X1.norm())))
    return worst


@check(
    "Output bound by the mass of the pool",
    where="Proposition prop:mech-output-bound, Lemma lem:Psi-bounded-reachable, Theorem thm:bounded-linear-readout-reachable",
    says="rho |o| over the pool's mass, t, times the largest |Psi| of its atoms, largest of 200 inputs",
    within=1.0,
)
def the_output_is_bounded_by_the_pool(base: str) -> float:
    step, _ = one_head(base)
    worst = 0.0
    for x in random_rows(200, seed=2):
        mu = pool(step, x)
        sizes = (
            step.strength(x, 0) * alpha(step, x, mu.u).abs() * (mu.v @ step.L2T(x, 0)).norm(dim=-1)
        )  # of Psi at every atom
        worst = largest(
            worst, float(step.rho(step.h(x, 0)) * step.real(x).norm() / (mu.total_variation * sizes.max()))
        )
    return worst


@check(
    "Readout is linear in the pool",
    where="Theorem thm:bounded-linear-readout-reachable",
    says="two contexts in one, no mixing: rho o against the sum of theirs",
    within=1e-9,
)
def readout_is_linear_in_the_pool(base: str) -> float:
    layer, x = random_layer(base, num_heads=1), random_rows(1, seed=9)[0]
    one, other = random_rows(4, seed=1), random_rows(5, seed=2)
    before, after, both = (Step(layer, X) for X in (one, other, torch.cat([one, other])))
    unscaled = [step.rho(step.h(x, 0)) * step.real(x) for step in (before, after, both)]
    return far(unscaled[0] + unscaled[1], unscaled[2])


@check(
    "Hidden width grows with the context",
    where="Proposition prop:ever-growing-width",
    says="slots that the operator activates for one of 100 inputs at step t = 1 to 12, minus t; or slots that h does not, the most",
    within=0,
)
def the_hidden_width_is_the_context(base: str) -> float:
    worst = 0.0
    for t in range(1, 13):
        step, used = Step(random_layer(base, num_heads=1), random_rows(t)), torch.zeros(t, dtype=torch.bool)
        for x in random_rows(100, seed=2):
            found = step.real_weights(x, mixed=False)[0] > 0
            used |= found & (step.h(x, 0) > 0)
            worst = largest(worst, float((found != (step.h(x, 0) > 0)).sum()))
        worst = largest(worst, abs(float(used.sum()) - t))
    return worst


@check(
    "Infinitely many reachable atoms",
    where="Proposition prop:infinite-dictionary",
    says="different atoms whose readout is the layer's output, among 500 contexts of one row each, over 500",
    at_least=1.0,
)
def every_row_is_an_atom_of_its_own(base: str) -> float:
    layer = random_layer(base, num_heads=1)
    atoms = []
    for x in random_rows(500, seed=2):
        step = Step(layer, x[None])
        mu = pool(step, x)
        expected = readout(step, x, active(step, x, mu), step.strength(x, 0)) / step.rho(step.h(x, 0))
        if not far(step.real(x), expected) <= 1e-9:
            return float("nan")
        atoms.append(torch.cat([mu.u[0], mu.v[0]]))
    return len(torch.unique(torch.stack(atoms), dim=0)) / 500
