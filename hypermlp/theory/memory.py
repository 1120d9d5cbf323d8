"""Memory: a pool of slots that the context instantiates, some of which are activated."""

from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.theory.check import check, far, largest, provided, size
from hypermlp.theory.objects import Step, T, full, random_layer, random_query, random_rows, random_step, times


class Measure(NamedTuple):
    """A finite signed measure: masses on atoms (u, v)."""

    u: Tensor  # [..., atoms, D]
    v: Tensor  # [..., atoms, D]
    mass: Tensor  # [..., atoms]

    def restricted(self, keep: Tensor) -> "Measure":
        """Return the measure on the atoms that ``keep`` (bool) selects; the others get mass 0."""
        return self._replace(mass=self.mass * keep)

    @property
    def total_variation(self) -> Tensor:
        return self.mass.abs().sum(-1)

    def merged(self) -> "Measure":
        """Return the same measure with equal atoms merged into one that has the sum of their masses."""
        atoms, index = torch.unique(torch.cat([self.u, self.v], dim=1), dim=0, return_inverse=True)
        mass = torch.zeros(len(atoms), dtype=self.mass.dtype).index_add(0, index, self.mass)
        u, v = atoms.split(self.u.shape[1], dim=1)
        return Measure(u, v, mass)


def pool(step: Step, x: Tensor) -> Measure:
    """Return a unit mass on every slot of the first head: the rows of U = R1ᵀ X and V = R2ᵀ X."""
    mass = x.new_ones(*x.shape[:-1], step.t)
    return Measure(step.R(x, 1).mT @ step.X1, step.R(x, 2).mT @ step.X2, mass)


def alpha(step: Step, x: Tensor, u: Tensor, head: int = 0) -> Tensor:
    """Return the address of every atom."""
    return times(x, step.L1(x, head), u.mT)


def beta(step: Step, x: Tensor, v: Tensor) -> Tensor:
    """Return the readout vector of every atom."""
    return v @ step.L2T(x)


def activated(step: Step, x: Tensor, mu: Measure) -> Measure:
    """Return the measure on the atoms with a positive address."""
    return mu.restricted(alpha(step, x, mu.u) > 0)


def readout(step: Step, x: Tensor, mu: Measure, strength: Tensor | float = 1.0) -> Tensor:
    """Return the integral of alpha beta over a measure, not divided by rho."""
    return times(mu.mass * strength * alpha(step, x, mu.u), beta(step, x, mu.v))


def read_memory(step: Step, x: Tensor) -> Tensor:
    """Return the readout of the activated pool over rho, which should be the output."""
    return readout(step, x, activated(step, x, pool(step, x)), step.strength(x)) / step.rho(x)


def one_head(base: str) -> Step:
    return random_step(full(base), num_heads=1)


QUERIES = 200


@check("Theorem thm:three-stage-memory-multistage-pruning", "Theorem thm:core_dynamic_head (ii)", within=1e-9)
def the_output_is_a_readout_of_activated_memory(base: str) -> float:
    """Three-stage memory: pool, activated memory, readout.

    Measured: the largest difference between the output and the readout of the activated slots over rho.
    """
    step = one_head(base)
    return far(step.real(step.newest), read_memory(step, step.newest))


@check("Proposition prop:mech-measure-readout", within=1e-9)
def the_output_is_an_integral_over_the_pool(base: str) -> float:
    """Dictionary-measure decomposition.

    Measured: the largest difference between the output and the integral of alpha+ beta over the whole pool,
    over rho.
    """
    step = one_head(base)
    x = step.newest
    mu = pool(step, x)
    positive = times(step.strength(x) * alpha(step, x, mu.u).clamp(min=0), beta(step, x, mu.v))
    return far(step.real(x), positive / step.rho(x))


@check("Lemma lem:mech-pushforward", within=1e-9, bases="R")  # HyperGLU's strength is a slot's, not an atom's
def equal_slots_add_up(base: str) -> float:
    """The pool is the pushforward of counting.

    Measured: the largest difference between the output for a context with repeated rows and the readout of a
    measure in which equal atoms are merged.
    """
    X = random_rows(3)[torch.tensor([0, 1, 0, 2, 2, 0, 1])]
    step, x = Step(random_layer(base, num_heads=1), X), random_query(seed=5)
    mu = pool(step, x).merged()
    difference = far(step.real(x), readout(step, x, activated(step, x, mu)) / step.rho(x))
    return provided(sorted(mu.mass.tolist()) == [2.0, 2.0, 3.0], difference)


@check("Theorem thm:tv-contraction-reachable", "Lemma lem:mech-tv-contraction", within=1.0)
def activation_contracts_total_variation(base: str) -> float:
    """Activation contracts total variation.

    Measured: the mass of what the operator activates over the mass of the pool, the largest ratio for 200
    inputs, with unit masses and with signed ones; NaN if the operator does not activate what has a positive
    address.
    """
    step, x = one_head(base), random_rows(QUERIES, seed=2)
    active, mu = step.active(x), pool(step, x)
    measures = (mu, mu._replace(mass=random_rows(QUERIES, T, seed=3)))
    ratios = (size(m.restricted(active).total_variation / m.total_variation) for m in measures)
    positive = activated(step, x, mu).total_variation
    return provided(torch.equal(active.sum(-1).double(), positive), largest(ratios))


@check("Remark rem:mech-tv-atomic", within=0)
def total_variation_counts_slots(base: str) -> float:
    """Total variation counts slots.

    Measured: the largest difference, over 200 inputs, between the mass of the activated measure and the
    number of slots that the operator activates.
    """
    step, x = one_head(base), random_rows(QUERIES, seed=2)
    return far(activated(step, x, pool(step, x)).total_variation, step.active(x).sum(-1))


@check("Lemma lem:reachable-compact", within=1.0)
def reachable_atoms_are_bounded(base: str) -> float:
    """Reachable atoms are bounded.

    Measured: the address of an active atom in the operator over |x| |L1| |R1| |X|, the largest ratio for 200
    inputs.
    """
    step, x = one_head(base), random_rows(QUERIES, seed=2)
    L1, R1 = (torch.linalg.matrix_norm(matrix, 2) for matrix in (step.L1(x), step.R(x, 1)))
    return float((step.real_h(x).amax(-1) / (x.norm(dim=-1) * L1 * R1 * step.X1.norm())).max())


@check(
    "Proposition prop:mech-output-bound",
    "Lemma lem:Psi-bounded-reachable",
    "Theorem thm:bounded-linear-readout-reachable",
    within=1.0,
)
def the_output_is_bounded_by_the_pool(base: str) -> float:
    """Output bound by the mass of the pool.

    Measured: rho |o| over the mass of the pool, t, times the largest |Psi| of its atoms, the largest ratio
    for 200 inputs.
    """
    step, x = one_head(base), random_rows(QUERIES, seed=2)
    mu = pool(step, x)
    psi = step.strength(x) * alpha(step, x, mu.u).abs() * beta(step, x, mu.v).norm(dim=-1)
    return size(step.real_unnormalised(x).norm(dim=-1) / (mu.total_variation * psi.amax(-1)))


@check("Theorem thm:bounded-linear-readout-reachable", within=1e-9)
def readout_is_linear_in_the_pool(base: str) -> float:
    """Readout is linear in the pool.

    Measured: the largest difference between rho o over two contexts in one, without mixing, and the sum of
    both contexts' rho o.
    """
    layer, x = random_layer(base, num_heads=1), random_query(seed=9)
    one, other = random_rows(4, seed=1), random_rows(5, seed=2)
    first, second, both = (Step(layer, X).real_unnormalised(x) for X in (one, other, torch.cat([one, other])))
    return far(first + second, both)


@check("Proposition prop:ever-growing-width", within=0)
def the_hidden_width_is_the_context(base: str) -> float:
    """Hidden width grows with the context.

    Measured: over t = 1 to 12, the largest of two numbers: t minus the number of slots that the operator
    activates for one of 100 inputs; the slots of one input at which the operator's state is not the sign of
    h.
    """
    queries = random_rows(100, seed=2)

    def difference(t: int) -> float:
        step = random_step(base, t, num_heads=1)
        states, signs = step.active(queries), step.h(queries) > 0
        unused = t - int((states & signs).any(0).sum())
        return float(max(unused, int((states != signs).sum(1).max())))

    return largest(map(difference, range(1, 13)))


@check("Proposition prop:infinite-dictionary", at_least=1.0)
def every_row_is_an_atom_of_its_own(base: str) -> float:
    """Infinitely many reachable atoms.

    Measured: the number of different atoms in 500 contexts of one row each, over 500; NaN if the readout of
    an atom is not the output.
    """
    layer, rows = random_layer(base, num_heads=1), random_rows(500, seed=2)
    steps = [Step(layer, x[None]) for x in rows]
    differences = (far(step.real(step.newest), read_memory(step, step.newest)) for step in steps)
    atoms = [torch.cat(pool(step, step.newest)[:2], dim=1) for step in steps]
    return provided(largest(differences) <= 1e-9, len(torch.unique(torch.cat(atoms), dim=0)) / len(rows))
