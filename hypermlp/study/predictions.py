"""The paper's seventh claim: which MAD tasks gain most from mixing along the sequence.

The statistic was fixed when three of the four pairs had no records yet. For each pair of rows without and
with a mix, the gain on a task is the difference of the accuracies. The rank correlation (Spearman) between
the six gains and the levels that the paper predicts is computed for each pair. The effect is its mean over
the pairs, with a 95 % interval from Student's t over the pairs.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from hypermlp.label import PAPER_ROWS, Label
from hypermlp.mad.report import PUBLISHED
from hypermlp.paper.predictions import GAIN_LEVELS, PREDICTED_GAIN
from hypermlp.reporting.table import Table
from hypermlp.study.claims import NOT_RUN, UNDECIDED, Effect, Verdict, verdict_on
from hypermlp.study.intervals import mean_interval, rank_correlation

NAME = "Mixing helps where it is predicted to"
STATEMENT = (
    "Compression, noisy and fuzzy recall gain most from mixing, selective copying less, clean recall and "
    "memorization least: the rank correlation between predicted and measured gains is positive."
)
Scores = Mapping[str, Mapping[str, float]]
"""``scores[row][task]``, between 0 and 1."""
Pair = tuple[str, str]
"""A row without a mix, and the same row with one."""
Gains = dict[Pair, dict[str, float]]
"""Differences of the accuracies by pair and task."""


def mixing_pairs() -> list[Pair]:
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


def gains(scores: Scores) -> Gains:
    """Return the gains of all pairs of which both rows have scores on all six tasks."""
    complete = {row for row, found in scores.items() if PREDICTED_GAIN.keys() <= found.keys()}
    return {
        (plain, mixed): {task: scores[mixed][task] - scores[plain][task] for task in PREDICTED_GAIN}
        for plain, mixed in mixing_pairs()
        if {plain, mixed} <= complete
    }


def paper_gains() -> Gains:
    """Return the gains in the paper's own table."""
    return gains(
        {row: {task: score / 100 for task, score in found.items()} for row, found in PUBLISHED.items()}
    )


def correlations(found: Gains) -> dict[Pair, float]:
    """Return the rank correlation of each pair's gains with the predicted levels."""
    levels = [GAIN_LEVELS.index(level) for level in PREDICTED_GAIN.values()]
    return {
        pair: rank_correlation(levels, [by_task[task] for task in PREDICTED_GAIN])
        for pair, by_task in found.items()
    }


def judge_predictions(scores: Scores) -> Verdict:
    """Judge the claim; with pairs missing, it is undecided."""
    found, pairs = gains(scores), mixing_pairs()
    missing = tuple(pair for pair in pairs if pair not in found)
    effect, verdict, effects = mean_interval(correlations(found).values()), NOT_RUN, []
    if effect is not None:
        verdict = UNDECIDED if missing else verdict_on(effect)
        effects.append(Effect(f"mean of {len(found)} of {len(pairs)} pairs", effect, verdict_on(effect)))
    return Verdict(
        NAME,
        STATEMENT,
        verdict,
        tuple(effects),
        missing,
        measure="rank correlation of predicted and measured gains",
        details=gains_table(found, paper_gains()),
    )


def gains_table(ours: Gains, paper: Gains) -> Table:
    """Return the gains in percentage points, with the paper's own in brackets, and the correlations."""

    def line(ours: Mapping[Pair, float], paper: Mapping[Pair, float], digits: str) -> list[str]:
        """Return a value for each pair and their mean."""
        groups = [*([pair] for pair in paper), list(paper)]
        shown = [[ours[pair] for pair in group if pair in ours] for group in groups]
        means = [f"{fmean(values):{digits}}" if values else "missing" for values in shown]
        theirs = [fmean(paper[pair] for pair in group) for group in groups]
        return [f"{own} ({published:{digits}})" for own, published in zip(means, theirs, strict=True)]

    def percent(found: Gains, task: str) -> dict[Pair, float]:
        return {pair: 100 * by_task[task] for pair, by_task in found.items()}

    lines = [
        [task, level, *line(percent(ours, task), percent(paper, task), "+.1f")]
        for task, level in PREDICTED_GAIN.items()
    ]
    last = ["rank correlation", "", *line(correlations(ours), correlations(paper), ".2f")]
    titles = ["task", "predicted gain", *(f"{plain} → {mixed}" for plain, mixed in paper), "mean"]
    return Table(titles, [*lines, last], left=frozenset(["predicted gain"]))
