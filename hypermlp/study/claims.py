"""The paper's six claims, each with the pairs of rows that test it."""

from dataclasses import dataclass

from hypermlp.study.intervals import Interval, paired_effects

MARGIN = 0.05  # nats within which two rows are called equally good


@dataclass(frozen=True)
class Claim:
    name: str
    says: str
    pairs: tuple[tuple[str, str], ...]
    """(worse, better), in the paper's words; for equality, (one, other)."""
    equality: bool = False


CLAIMS = (
    Claim(
        "Softmax is not essential",
        f"ReLU attention is within {MARGIN} nats of softmax attention that has the same upgrades.",
        (("S-p", "R-p"), ("S-c", "R-c"), ("S-pc", "R-pc")),
        equality=True,
    ),
    Claim(
        "Sequence mixing dominates",
        "Learned mixing along the sequence lowers the loss, everything else being equal.",
        (("R-cg-q", "R-cg-q-12o"), ("G-cg-q", "G-cg-q-12o"), ("R-c", "R-c-12o!")),
    ),
    Claim(
        "The lag layout is necessary",
        "Mixing in lag order has a lower loss than mixing over absolute positions.",
        (("R-12!", "R-12o!"), ("G-12!", "G-12o!")),
    ),
    Claim(
        "Two-sided mixing helps",
        "Mixing before and after the activation is better than on one side.",
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
        "The GLU form is better than the ReLU form, and the best of all at its budget.",
        (("R-cg-q", "G-cg-q"), ("R-cg-q-12o", "G-cg-q-12o"), ("S-p", "G-cg-q-12o")),
    ),
)
CLAIMED = {row for claim in CLAIMS for pair in claim.pairs for row in pair}
SUPPORTED, AGAINST, UNDECIDED, UNTRIED = (
    "supported",
    "not supported",
    "undecided at this size",
    "rows not run",
)


@dataclass(frozen=True)
class PairVerdict:
    worse: str
    better: str
    effect: Interval
    """How much lower the loss of ``better`` is."""
    verdict: str


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    pairs: tuple[PairVerdict, ...]

    @property
    def verdict(self) -> str:
        """Supported by all pairs; not supported if one speaks against it."""
        found = {pair.verdict for pair in self.pairs}
        if not found:
            return UNTRIED
        if AGAINST in found:
            return AGAINST
        return SUPPORTED if found == {SUPPORTED} and len(self.pairs) == len(self.claim.pairs) else UNDECIDED


def judge(losses: dict[str, dict[int, float]]) -> list[Verdict]:
    """``losses[row][seed]``. Pairs that have no seed in common are left out."""
    pairs = [pair for claim in CLAIMS for pair in claim.pairs]
    effects = dict(zip(pairs, paired_effects([_differences(losses, *pair) for pair in pairs]), strict=True))
    verdicts = []
    for claim in CLAIMS:
        found = ((pair, effects[pair]) for pair in claim.pairs)
        judged = tuple(
            PairVerdict(*pair, effect, _verdict(effect, claim.equality))
            for pair, effect in found
            if effect is not None
        )
        verdicts.append(Verdict(claim, judged))
    return verdicts


def _differences(losses: dict[str, dict[int, float]], worse: str, better: str) -> list[float]:
    one, other = losses.get(worse, {}), losses.get(better, {})
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def _verdict(effect: Interval, equality: bool) -> str:
    if equality:
        if effect.high < -MARGIN or effect.low > MARGIN:
            return AGAINST
        return SUPPORTED if effect.low > -MARGIN and effect.high < MARGIN else UNDECIDED
    if effect.low > 0:
        return SUPPORTED
    return AGAINST if effect.high < 0 else UNDECIDED
