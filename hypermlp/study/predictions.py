"""The paper's seventh claim: which MAD tasks gain most from mixing along the sequence.

The statistic was fixed when three of the four pairs had no records yet. For each pair of rows without and
with a mix, the gain on a task is the difference of the accuracies. The rank correlation (Spearman) between
the six gains and the levels that the paper predicts is computed for each pair. The effect is its mean over
the pairs, with a 95 % interval from Student's t over the pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from hypermlp.label import PAPER_ROWS, Label
from hypermlp.mad.report import PUBLISHED
from hypermlp.paper.predictions import GAIN_LEVELS, PREDICTED_GAIN
from hypermlp.reporting.table import Table
from hypermlp.study.claims import NOT_RUN, UNDECIDED, Effect, Verdict, verdict_on
from hypermlp.study.intervals import Interval, paired_effects, rank_correlation

NAME = "Mixing helps where it is predicted to"
STATEMENT = (
    "Compression, noisy and fuzzy recall gain most from mixing, selective copying less, clean recall and "
    "memorization least: the rank correlation between predicted and measured gains is positive."
)
Scores = Mapping[str, Mapping[str, float]]
"""``scores[row][task]``, between 0 and 1."""


def mixing_pairs() -> list[tuple[str, str]]:
    """Return the pairs of the paper's rows that differ in nothing but a two-sided mix in lag order.

    No row is in two pairs, so the pairs are independent.
    """
    pairs = []
    for name in PAPER_ROWS:
        label = Label.parse(name)
        if label.mix == "12" and label.lag:
            plain = str(replace(label, mix="", lag=False, full_width=False))
            pairs += [(plain, name)] if plain in PAPER_ROWS else []
    return pairs


@dataclass(frozen=True)
class Gains:
    """The gains of the pairs that were run on all six tasks, and their agreement with the prediction."""

    by_pair: dict[tuple[str, str], dict[str, float]]
    """(without, with) -> task -> difference of the accuracies."""

    def correlations(self) -> dict[tuple[str, str], float]:
        """Return the rank correlation of each pair's gains with the predicted levels."""
        levels = [GAIN_LEVELS.index(level) for level in PREDICTED_GAIN.values()]
        return {
            pair: rank_correlation(levels, [gains[task] for task in PREDICTED_GAIN])
            for pair, gains in self.by_pair.items()
        }

    @property
    def effect(self) -> Interval | None:
        """The mean rank correlation over the pairs; None without pairs."""
        (found,) = paired_effects([list(self.correlations().values())])
        return found

    def table(self, paper: "Gains") -> Table:
        """Return the gains in percentage points, with those of ``paper`` in brackets."""
        pairs = list(paper.by_pair)
        titles = ["task", "predicted gain", *(f"{plain} → {mixed}" for plain, mixed in pairs), "mean"]
        lines = [
            [
                task,
                level,
                *(self._cell(task, [pair], paper) for pair in pairs),
                self._cell(task, pairs, paper),
            ]
            for task, level in PREDICTED_GAIN.items()
        ]
        last = ["rank correlation", ""]
        ours, theirs = self.correlations(), paper.correlations()
        last += [
            f"{f'{ours[pair]:.2f}' if pair in ours else 'missing'} ({theirs[pair]:.2f})" for pair in pairs
        ]
        mean = f"{fmean(ours.values()):.2f}" if ours else "missing"
        last.append(f"{mean} ({fmean(theirs.values()):.2f})")
        return Table(titles, [*lines, last], left=frozenset(["predicted gain"]))

    def _cell(self, task: str, pairs: list[tuple[str, str]], paper: "Gains") -> str:
        ours = [self.by_pair[pair][task] for pair in pairs if pair in self.by_pair]
        theirs = [paper.by_pair[pair][task] for pair in pairs]
        shown = f"{100 * fmean(ours):+.1f}" if ours else "missing"
        return f"{shown} ({100 * fmean(theirs):+.1f})"


def gains(scores: Scores) -> Gains:
    """Return the gains of all pairs of which both rows have scores on all six tasks."""
    complete = {row for row, found in scores.items() if PREDICTED_GAIN.keys() <= found.keys()}
    return Gains(
        {
            (plain, mixed): {task: scores[mixed][task] - scores[plain][task] for task in PREDICTED_GAIN}
            for plain, mixed in mixing_pairs()
            if {plain, mixed} <= complete
        }
    )


def paper_gains() -> Gains:
    """Return the gains in the paper's own table."""
    return gains(
        {row: {task: score / 100 for task, score in found.items()} for row, found in PUBLISHED.items()}
    )


def judge_predictions(scores: Scores) -> Verdict:
    """Judge the claim; with pairs missing, it is undecided."""
    found, pairs = gains(scores), mixing_pairs()
    run = list(found.by_pair)
    missing = tuple(pair for pair in pairs if pair not in run)
    verdict, effects = NOT_RUN, []
    if found.effect is not None:
        verdict = verdict_on(found.effect)
        effects.append(Effect(f"mean of {len(run)} of {len(pairs)} pairs", found.effect, verdict))
    return Verdict(
        NAME,
        STATEMENT,
        UNDECIDED if run and missing else verdict,
        tuple(effects),
        missing,
        measure="rank correlation of predicted and measured gains",
        details=found.table(paper_gains()),
    )
