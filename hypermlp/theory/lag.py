"""Lag order: more history at the far end changes nothing that is already there."""

import torch
from torch import Tensor

from hypermlp.layers.mixer import Mixer
from hypermlp.ops.arguments import Mix
from hypermlp.theory.check import check, largest
from hypermlp.theory.mlp import far
from hypermlp.theory.objects import Step, attend, random_layer, random_rows

SHORT, LONG = 6, 11


def extended(layer: Mixer, t: int) -> Mixer:
    """The mixes of length t inside longer ones: p = -1 and no low-rank part beyond, so that R_T = P R_t Pᵀ."""
    for mix in (layer.mix1, layer.mix2):
        if mix is not None:
            mix.diag[:, t:] = -1.0
            mix.left[:, t:] = 0.0
            mix.right[:, t:] = 0.0
    return layer


def long_and_short(base: str, *, lag: bool, keep: str) -> tuple[Step, Step, Tensor]:
    """The same layer over a long history and over a part of it: its newest or its oldest rows; and a query."""
    layer = extended(random_layer(f"{base}-g-q-12{'o' if lag else ''}"), SHORT)
    X = random_rows(LONG)
    return (
        Step(layer, X),
        Step(layer, X[-SHORT:] if keep == "newest" else X[:SHORT]),
        random_rows(1, seed=4)[0],
    )


@check(
    "DPLR mixes can be extended consistently",
    where="Lemma lem:dplr-extension-consistency",
    says="the operator's weights over a long history against those over its newest rows, and zeros",
    within=1e-9,
)
def mixes_extend_consistently(base: str) -> float:
    long, short, x = long_and_short(base, lag=True, keep="newest")
    R_T, R_t = long.R(x, 1, 0), short.R(x, 1, 0)
    P = torch.eye(LONG, SHORT, dtype=x.dtype)
    padded = torch.nn.functional.pad(short.real_weights(x), (0, LONG - SHORT))
    return largest(far(R_T, P @ R_t @ P.T), far(long.real_weights(x), padded))


@check(
    "Truncation invariance in lag order",
    where="Theorem thm:core_lag_layout, Theorem thm:offset-better (i), Corollary cor:truncation-invariance",
    says="the output over a long history against that over its newest rows",
    within=1e-9,
)
def older_rows_change_nothing_in_lag_order(base: str) -> float:
    long, short, x = long_and_short(base, lag=True, keep="newest")
    return far(long.real(x), short.real(x))


@check(
    "A window is a truncated history",
    where="Theorem thm:core_lag_layout, Corollary cor:truncation-invariance",
    says="the operator over a long history that starts at its newest rows against that over those alone; not a number if all give the same",
    within=1e-9,
)
def a_window_is_a_truncated_history(base: str) -> float:
    layer, X, x = random_layer(f"{base}-g-q-12o"), random_rows(LONG), random_rows(1, seed=4)[0]
    long, short = Step(layer, X), Step(layer, X[-SHORT:])
    starts = torch.full((1, 1), LONG - SHORT)
    alone, window, whole = (
        step.attend(*step.operands(x), step.values(), starts=where)
        for step, where in ((short, None), (long, starts), (long, None))
    )
    return far(window, alone) if far(whole, alone) > 1e-3 else float("nan")


@check(
    "Forward order keeps the oldest rows",
    where="Theorem thm:offset-better (ii)",
    says="in forward order, the output over a long history against that over its oldest rows",
    within=1e-9,
)
def forward_order_keeps_the_oldest(base: str) -> float:
    long, short, x = long_and_short(base, lag=False, keep="oldest")
    return far(long.real(x), short.real(x))


@check(
    "Forward order does not keep the newest rows",
    where="Theorem thm:offset-better (ii)",
    says="in forward order, the output over a long history against that over its newest rows: how far apart",
    at_least=1e-2,
)
def forward_order_loses_the_newest(base: str) -> float:
    long, short, x = long_and_short(base, lag=False, keep="newest")
    oldest = long_and_short(base, lag=False, keep="oldest")[1]
    return far(long.real(x), short.real(x)) if far(long.real(x), oldest.real(x)) < 1e-9 else 0.0


@check(
    "Longer contexts can do whatever shorter ones can",
    where="Corollary cor:imp3_monotone",
    says="a layer for t = 1 to 10 inside one for 11: outputs apart, the largest",
    within=1e-9,
)
def the_realizable_family_is_monotone(base: str) -> float:
    X, x, worst = random_rows(LONG), random_rows(1, seed=4)[0], 0.0
    for t in range(1, LONG):
        layer = random_layer(f"{base}-g-q-12o", seed=t)
        alone = Step(layer, X[-t:]).real(x)
        worst = largest(worst, far(Step(extended(layer, t), X).real(x), alone))
    return worst


@check(
    "Rows beyond are slots at zero",
    where="Corollary cor:truncation-invariance, Remark rem:imp1_infinite_doc",
    says="slots that a long history adds and the operator activates, over 100 queries",
    within=0,
)
def far_history_activates_nothing(base: str) -> float:
    long, _, _ = long_and_short(base, lag=True, keep="newest")
    return float(
        sum(int((long.real_weights(x, mixed=False)[:, SHORT:] != 0).sum()) for x in random_rows(100, seed=5))
    )


@check(
    "A lag kernel is a causal convolution",
    where="Remark rem:app_cost_fft",
    says="the operator with a mix that collects all lags in slot 0, at every step, against an FFT of the scores with the kernel",
    within=1e-9,
)
def lag_kernels_are_causal_convolutions(base: str) -> float:
    T, branches = 12, 2 if base == "G" else 1
    scores = random_rows(1, T, seed=3)[0]  # the score of every key, whoever asks
    kernel = random_rows(1, T, seed=4)[0]
    q = torch.ones(1, T, branches, 1, dtype=torch.float64)
    k = scores.view(1, T, 1, 1).expand(1, T, branches, 1)
    left = kernel.view(1, T, 1).expand(branches, T, 1)
    right = torch.zeros(branches, T, 1, dtype=torch.float64)
    right[:, 0] = 1.0
    mix = Mix(
        torch.zeros(branches, T, dtype=torch.float64),
        left,
        right,
        torch.ones(1, T, branches, 1, dtype=torch.float64),
    )
    values = torch.eye(T, dtype=torch.float64).view(1, T, 1, T)
    activation = "glu" if base == "G" else "relu"
    weights = attend(q, k, values, mix, None, activation=activation)[0, :, 0]
    fast = torch.fft.irfft(torch.fft.rfft(scores, 2 * T) * torch.fft.rfft(kernel, 2 * T), 2 * T)[:T]
    worst = 0.0
    for t in range(T):
        h = scores[: t + 1].flip(0).clone()
        h[0] += fast[t]
        strength = torch.logaddexp(h[0], torch.zeros_like(h[0])) if base == "G" else 1.0
        worst = largest(
            worst, far(weights[t, t], strength * (h[0] / (h.square().sum() + 1e-12).sqrt()).clamp(min=0))
        )
    return worst
