"""Lag order: more history at the far end changes nothing that is already there."""

import torch
from torch import Tensor

from hypermlp.layers.mixer import Mixer
from hypermlp.ops import Mix
from hypermlp.theory.check import check, far, largest, provided
from hypermlp.theory.objects import (
    ACTIVATION,
    BRANCHES,
    Step,
    attend,
    random_layer,
    random_query,
    random_rows,
)

SHORT, LONG = 6, 11
NEWEST, OLDEST = slice(-SHORT, None), slice(SHORT)
LAYOUT, TRUNCATION = "Theorem thm:core_lag_layout", "Corollary cor:truncation-invariance"


def extended(layer: Mixer, t: int) -> Mixer:
    """Cut the mixes to length t, in place: p = -1 and no low rank beyond t, so that R_T = P R_t Pᵀ."""
    for mix in (layer.mix1, layer.mix2):
        if mix is not None:
            mix.diag[:, t:] = -1.0
            mix.left[:, t:] = 0.0
            mix.right[:, t:] = 0.0
    return layer


def long_and_short(base: str, *, order: str = "o", kept: slice = NEWEST) -> tuple[Step, Step, Tensor]:
    """Return one layer's steps over a long history and over the kept rows of it, and a query.

    Args:
        order: "o" for lag order, "" for forward order, as in a label.
    """
    layer, X = extended(random_layer(f"{base}-g-q-12{order}"), SHORT), random_rows(LONG)
    return Step(layer, X), Step(layer, X[kept]), random_query(seed=4)


def output_difference(base: str, *, order: str = "o", kept: slice = NEWEST) -> float:
    """Return the largest difference between the outputs over a long history and over the kept rows of it."""
    long, short, x = long_and_short(base, order=order, kept=kept)
    return far(long.real(x), short.real(x))


@check("Lemma lem:dplr-extension-consistency", within=1e-9)
def mixes_extend_consistently(base: str) -> float:
    """DPLR mixes can be extended consistently.

    Measured: the largest difference between the operator's weights over a long history and those over its
    newest rows, followed by zeros; and that between R_T and P R_t Pᵀ.
    """
    long, short, x = long_and_short(base)
    P = torch.eye(LONG, SHORT, dtype=x.dtype)
    weights = far(long.real_weights(x), short.real_weights(x) @ P.T)
    return largest([weights, far(long.R(x, 1), P @ short.R(x, 1) @ P.T)])


@check(LAYOUT, "Theorem thm:offset-better (i)", TRUNCATION, within=1e-9)
def older_rows_change_nothing_in_lag_order(base: str) -> float:
    """Truncation invariance in lag order.

    Measured: the largest difference between the output over a long history and that over its newest rows.
    """
    return output_difference(base)


@check(LAYOUT, TRUNCATION, within=1e-9)
def a_window_is_a_truncated_history(base: str) -> float:
    """A window is a truncated history.

    Measured: the largest difference between the operator over a long history with starts at its newest
    rows and the operator over these rows alone; NaN if the older rows make no difference without starts.
    """
    layer, X, x = random_layer(f"{base}-g-q-12o"), random_rows(LONG), random_query(seed=4)
    long, short = Step(layer, X), Step(layer, X[NEWEST])
    whole, alone = (step.operator(x)(step.values) for step in (long, short))
    window = long.operator(x)(long.values, starts=torch.full((1, 1), LONG - SHORT))
    return provided(far(whole, alone) > 1e-3, far(window, alone))


@check("Theorem thm:offset-better (ii)", within=1e-9)
def forward_order_keeps_the_oldest(base: str) -> float:
    """Forward order keeps the oldest rows.

    Measured: in forward order, the largest difference between the output over a long history and that over
    its oldest rows.
    """
    return output_difference(base, order="", kept=OLDEST)


@check("Theorem thm:offset-better (ii)", at_least=1e-2)
def forward_order_loses_the_newest(base: str) -> float:
    """Forward order does not keep the newest rows.

    Measured: in forward order, the largest difference between the output over a long history and that over
    its newest rows; NaN if the oldest rows are not kept.
    """
    kept = output_difference(base, order="", kept=OLDEST) < 1e-9
    return provided(kept, output_difference(base, order=""))


@check("Corollary cor:imp3_monotone", within=1e-9)
def the_realizable_family_is_monotone(base: str) -> float:
    """Longer contexts can do whatever shorter ones can.

    Measured: the largest difference between the outputs of a layer for t = 1 to 10 rows and of one for 11
    that contains it.
    """
    X, x = random_rows(LONG), random_query(seed=4)

    def difference(t: int) -> float:
        layer = random_layer(f"{base}-g-q-12o", seed=t)
        alone = Step(layer, X[-t:]).real(x)
        return far(Step(extended(layer, t), X).real(x), alone)

    return largest(map(difference, range(1, LONG)))


@check(TRUNCATION, "Remark rem:imp1_infinite_doc", within=0)
def far_history_activates_nothing(base: str) -> float:
    """Truncated rows are inactive slots.

    Measured: the number of slots, over 100 queries, that a long history adds and the operator activates.
    """
    long, _, _ = long_and_short(base)
    return float((long.real_activation(random_rows(100, seed=5))[..., SHORT:] != 0).sum())


@check("Remark rem:app_cost_fft", within=1e-9)
def lag_kernels_are_causal_convolutions(base: str) -> float:
    """A lag kernel is a causal convolution.

    Measured: the largest difference, over all steps, between the weight of slot 0 in the operator, with a mix
    that collects all lags there, and the one that an FFT of the scores with the kernel gives.
    """
    length, branches = 12, BRANCHES[base]
    scores, kernel = random_rows(2, length, seed=3)  # the score of a key is the same for every query
    q = torch.ones(1, length, branches, 1, dtype=torch.float64)
    k = scores.view(1, length, 1, 1).expand_as(q)
    left = kernel.view(1, length, 1).expand(branches, -1, -1)
    right = torch.zeros_like(left).index_fill(1, torch.tensor(0), 1.0)
    values = torch.eye(length, dtype=torch.float64).view(1, length, 1, length)
    mix = Mix(torch.zeros_like(left[:, :, 0]), left, right, gate=q)
    weights = attend(q, k, values, mix, activation=ACTIVATION[base])[0, :, 0].diagonal()
    transform = torch.fft.rfft(torch.stack([scores, kernel]), 2 * length)
    collected = torch.fft.irfft(transform.prod(0), 2 * length)[:length]

    h = scores + collected  # of slot 0 at every step; the other slots keep their scores
    rho = (scores.square().cumsum(0) - scores.square() + h.square() + 1e-12).sqrt()
    strength = torch.logaddexp(h, torch.zeros_like(h)) if base == "G" else torch.ones_like(h)
    return far(weights, strength * (h / rho).clamp(min=0))
