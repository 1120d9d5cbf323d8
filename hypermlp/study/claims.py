"""The paper's six claims, each with the pairs of rows that test it."""

import math
from dataclasses import dataclass

from hypermlp.study.intervals import Interval, paired_effects

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
        "Learned mixing along the sequence lowers the loss, all else being equal.",
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
SUPPORTED, AGAINST, UNDECIDED = "supported", "not supported", "undecided at this size"
NOT_RUN = "rows not run"


@dataclass(frozen=True)
class PairVerdict:
    """The verdict on one pair of rows."""

    worse: str
    better: str
    effect: Interval
    """Loss of ``worse`` minus loss of ``better``."""
    verdict: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim."""

    claim: Claim
    pairs: tuple[PairVerdict, ...]
    """Pairs that were run with a common seed."""

    @property
    def verdict(self) -> str:
        """Supported if all pairs of the claim support it; not supported if one pair speaks against it."""
        verdicts = {pair.verdict for pair in self.pairs}
        if not verdicts:
            return NOT_RUN
        if AGAINST in verdicts:
            return AGAINST
        complete = len(self.pairs) == len(self.claim.pairs)
        return SUPPORTED if verdicts == {SUPPORTED} and complete else UNDECIDED


def judge(losses: dict[str, dict[int, float]]) -> list[Verdict]:
    """Judge every claim by ``losses[row][seed]``. Pairs of rows without a common seed are left out."""
    pairs = [pair for claim in CLAIMS for pair in claim.pairs]
    effects = dict(zip(pairs, paired_effects([_differences(losses, *pair) for pair in pairs]), strict=True))
    judged = {
        claim: tuple(
            PairVerdict(*pair, effect, _verdict(effect, claim.equality))
            for pair in claim.pairs
            if (effect := effects[pair]) is not None
        )
        for claim in CLAIMS
    }
    return [Verdict(claim, pairs) for claim, pairs in judged.items()]


def _differences(losses: dict[str, dict[int, float]], worse: str, better: str) -> list[float]:
    one, other = losses.get(worse, {}), losses.get(better, {})
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def _verdict(effect: Interval, equality: bool) -> str:
    """Compare the interval of an effect with the range of effects that the claim allows."""
    low, high = (-MARGIN, MARGIN) if equality else (0.0, math.inf)
    if effect.high < low or effect.low > high:
        return AGAINST
    return SUPPORTED if low < effect.low and effect.high < high else UNDECIDED
