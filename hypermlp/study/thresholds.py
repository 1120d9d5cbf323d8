"""Steps until the loss falls to a threshold, as in Table 1 of the paper.

The thresholds follow from one row by a rule that was fixed before the tuned study was run
(docs/study.md, "Steps to a loss"): they are the losses of softmax attention with RoPE after 40, 60,
80 and 100 % of its steps.
"""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

THRESHOLD_ROW = "S-p"
FRACTIONS = (0.4, 0.6, 0.8, 1.0)
Curve = list[tuple[float, float]]
"""(step, loss) of every evaluation, in the order of the steps."""


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> Curve:
    """Return the mean of curves with the same steps, one for each seed."""
    steps = [[step for step, _ in curve] for curve in curves]
    if any(other != steps[0] for other in steps):
        raise ValueError(f"the curves have different steps: {steps}")
    return [(points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]


def thresholds(curve: Curve) -> tuple[float, ...]:
    """Return the losses of a curve after FRACTIONS of its steps, interpolated between evaluations.

    Example::

        thresholds([(50, 3.0), (100, 2.0)])  # at steps 40, 60, 80 and 100: (3.0, 2.8, 2.4, 2.0)
    """
    steps, losses = zip(*curve, strict=True)
    return tuple(float(np.interp(fraction * steps[-1], steps, losses)) for fraction in FRACTIONS)


def steps_to(curve: Curve, threshold: float) -> float | None:
    """Return the step at which a curve first falls to ``threshold``, interpolated between evaluations.

    None if it never does. A curve that is that low at its first evaluation gets the step of this
    evaluation, which is an upper bound.
    """
    for index, (step, loss) in enumerate(curve):
        if loss <= threshold:
            if index == 0:
                return step
            before, higher = curve[index - 1]
            return before + (step - before) * (higher - threshold) / (higher - loss)
    return None
