"""The paper's claims about losses, each with the pairs of rows that test it.

The seventh claim, about MAD, is in hypermlp/study/predictions.py.
"""

import math
from dataclasses import dataclass

from hypermlp.reporting.table import Table
from hypermlp.study.intervals import Interval, paired, paired_effects

MARGIN = 0.05  # two rows are equally good if their losses differ by less, in nats


@dataclass(frozen=True)
class Claim:
    """A statement about the losses of pairs of rows."""

    name: str
    statement: str
    pairs: tuple[tuple[str, str], ...]
    """(worse, better) according to the paper; for equality, the order does not matter."""
    equality: bool = False
    """Whether the claim is that the two rows of a pair are equally good."""


CLAIMS = (
    Claim(
        "Softmax is not essential",
        f"ReLU attention is within {MARGIN} nats of softmax attention with the same features.",
        (("S-p", "R-p"), ("S-c", "R-c"), ("S-pc", "R-pc")),
        equality=True,
    ),
    Claim(
        "Sequence mixing dominates",
        "Adding learned mixing along the sequence, and its parameters, lowers the loss.",
        (("R-cg-q", "R-cg-q-12o"), ("G-cg-q", "G-cg-q-12o"), ("R-c", "R-c-12o!")),
    ),
    Claim(
        "The lag layout is necessary",
        "Mixing in lag order has a lower loss than mixing over absolute positions.",
        (("R-12!", "R-12o!"), ("G-12!", "G-12o!")),
    ),
    Claim(
        "Two-sided mixing helps",
        "Mixing on both sides of the activation has a lower loss than mixing on one side.",
        (
            ("R-cg-q-1o", "R-cg-q-12o"),
            ("G-cg-q-1o", "G-cg-q-12o"),
            ("R-1o!", "R-12o!"),
            ("G-1o!", "G-12o!"),
            ("G-2o!", "G-12o!"),
        ),
    ),
    Claim(
        "Shrink QK, not VO",
        "Of two rows with the same number of parameters, the one that shrinks QK has the lower loss.",
        (("S-c-v", "S-c-q"), ("R-c-v", "R-c-q")),
    ),
    Claim(
        "HyperGLU is better",
        "The GLU form has a lower loss than the ReLU form and than softmax attention with RoPE.",
        (("R-cg-q", "G-cg-q"), ("R-cg-q-12o", "G-cg-q-12o"), ("S-p", "G-cg-q-12o")),
    ),
)
CLAIMED = {row for claim in CLAIMS for pair in claim.pairs for row in pair}
SUPPORTED, REFUTED, UNDECIDED = "supported", "refuted", "undecided"
NOT_RUN = "rows not run"
LOWER = "how much lower the second's loss is"


@dataclass(frozen=True)
class Effect:
    """One measured effect of a claim, and the verdict on it."""

    name: str
    effect: Interval
    verdict: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim."""

    name: str
    statement: str
    verdict: str
    """SUPPORTED, REFUTED, UNDECIDED or NOT_RUN."""
    effects: tuple[Effect, ...]
    missing: tuple[tuple[str, str], ...] = ()
    """Pairs of the claim that were not run with a common seed."""
    measure: str = LOWER
    """What the effects are."""
    margin: float = 0.0
    """For a claim of equality, how far from zero an effect may be."""
    details: Table | None = None
    """What the effects were computed from, where the main table does not show it."""


def judge(losses: dict[str, dict[int, float]]) -> list[Verdict]:
    """Judge every claim by ``losses[row][seed]``. Pairs of rows without a common seed are missing."""
    pairs = [pair for claim in CLAIMS for pair in claim.pairs]
    differences = [paired(losses.get(worse, {}), losses.get(better, {})) for worse, better in pairs]
    found = dict(zip(pairs, paired_effects(differences), strict=True))
    return [_judged(claim, {pair: found[pair] for pair in claim.pairs}) for claim in CLAIMS]


def _judged(claim: Claim, found: dict[tuple[str, str], Interval | None]) -> Verdict:
    margin = MARGIN if claim.equality else 0.0
    effects = tuple(
        Effect(pair_name(pair), effect, verdict_on(effect, margin))
        for pair, effect in found.items()
        if effect is not None
    )
    missing = tuple(pair for pair, effect in found.items() if effect is None)
    verdict = _together({effect.verdict for effect in effects}, complete=not missing)
    return Verdict(claim.name, claim.statement, verdict, effects, missing, margin=margin)


def _together(verdicts: set[str], complete: bool) -> str:
    """Combine verdicts on pairs: one pair can refute a claim, but only all pairs together support it."""
    if not verdicts:
        return NOT_RUN
    if REFUTED in verdicts:
        return REFUTED
    return SUPPORTED if verdicts == {SUPPORTED} and complete else UNDECIDED


def pair_name(pair: tuple[str, str]) -> str:
    """Return a pair of rows as text."""
    return f"{pair[0]} → {pair[1]}"


def verdict_on(effect: Interval, margin: float = 0.0) -> str:
    """Compare the interval of an effect with what a claim allows.

    That is anything above zero or, with a ``margin``, anything closer to zero than the margin.
    """
    low, high = (-margin, margin) if margin else (0.0, math.inf)
    if effect.high < low or effect.low > high:
        return REFUTED
    return SUPPORTED if low < effect.low and effect.high < high else UNDECIDED
