"""The operator and its gradients in NumPy, float64, one query after another.

Written from docs/derivation.md and the paper alone. It shares no code with the package, and is slow on
purpose: a loop over sequences and queries, with every sum over the keys that this one query sees.

Shapes: B sequences, Tq queries, Tk keys, H heads, G score branches (H, or 2 H for "glu"), Dk, Dv widths,
n visible keys, r rank.
"""

from typing import NamedTuple

import numpy as np

MIX_FIELDS = ("diag", "left", "right", "gate")


class Inputs(NamedTuple):
    """The arguments of the operator as float64 arrays; a mix is a tuple (diag, left, right, gate) or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mix1: tuple | None
    mix2: tuple | None
    starts: np.ndarray  # int [B, Tq]
    activation: str
    layout: str
    eps: float

    def arrays(self):
        """Return the differentiable arrays by name."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        for mix, name in ((self.mix1, "mix1"), (self.mix2, "mix2")):
            named |= {f"{name}.{field}": x for field, x in zip(MIX_FIELDS, mix or (), strict=False)}
        return named

    def replaced(self, arrays):
        """Return the inputs with other arrays, given as ``arrays()`` returns them."""
        mixes = {
            name: mix and tuple(arrays[f"{name}.{field}"] for field in MIX_FIELDS)
            for name, mix in (("mix1", self.mix1), ("mix2", self.mix2))
        }
        return self._replace(q=arrays["q"], k=arrays["k"], v=arrays["v"], **mixes)


class Extremes:
    """The largest magnitudes of intermediate results, and the smallest of the rows' largest ones."""

    def __init__(self):
        self.largest = 0.0
        self.smallest = np.inf
        self.kink = np.inf
        """The smallest |h| relative to the sum of the magnitudes of its terms."""

    def see(self, x):
        """Take in an array whose rows along the last axis belong together."""
        rows = np.abs(x).max(axis=-1)
        self.largest = max(self.largest, float(rows.max()))
        nonzero = rows[rows > 0]
        if nonzero.size:
            self.smallest = min(self.smallest, float(nonzero.min()))

    def see_kink(self, h, terms):
        seen = np.abs(h[terms > 0]) / terms[terms > 0]
        if seen.size:
            self.kink = min(self.kink, float(seen.min()))


def visible(t, start, layout):
    """Return the positions of the keys that the query at position t sees, in slot order."""
    seen = np.arange(start, t + 1)
    return seen[::-1] if layout == "lag" else seen


def low_rank(y, first, second, gate):
    """Return (y first) * gate secondᵀ for each head, and y first."""
    inner = np.einsum("hn,hnr->hr", y, first)
    return np.einsum("hr,hnr->hn", inner * gate, second), inner


class Mixed:
    """One mix at one query: the first n rows of its parameters, and its gate."""

    def __init__(self, mix, b, i, n):
        diag, left, right, gate = mix
        self.diag, self.left, self.right, self.gate = 1.0 + diag[:, :n], left[:, :n], right[:, :n], gate[b, i]

    def times(self, y):
        """Return y R."""
        return y * self.diag + low_rank(y, self.left, self.right, self.gate)[0]

    def times_transposed(self, y):
        """Return y Rᵀ."""
        return y * self.diag + low_rank(y, self.right, self.left, self.gate)[0]

    def terms(self, y, transposed=False):
        """Return the sum of the magnitudes of the terms of y R, or of y Rᵀ."""
        first, second = (self.right, self.left) if transposed else (self.left, self.right)
        low = low_rank(np.abs(y), np.abs(first), np.abs(second), np.abs(self.gate))[0]
        return np.abs(y) * (1.0 + np.abs(self.diag - 1.0)) + low


def softplus(x):
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x):
    return np.exp(-softplus(-x))


def norm(h, eps):
    return np.sqrt((h * h).sum(axis=-1, keepdims=True) + eps)


def unchanged(x, terms=None, may_underflow=False):
    return x


class Query:
    """The computation of one query: scores, first mix, activation, second mix, readout."""

    def __init__(self, inputs: Inputs, b, i, extremes=None, noise=None):
        self.inputs, self.b, self.i = inputs, b, i
        self.noise = noise or unchanged
        t = inputs.k.shape[1] - inputs.q.shape[1] + i
        self.seen = visible(t, int(inputs.starts[b, i]), inputs.layout)
        n = len(self.seen)
        self.empty = n == 0
        if self.empty:
            return
        self.q, self.keys, self.values = inputs.q[b, i], inputs.k[b, self.seen], inputs.v[b, self.seen]
        self.first = inputs.mix1 and Mixed(inputs.mix1, b, i, n)
        self.second = inputs.mix2 and Mixed(inputs.mix2, b, i, n)
        self.z = self.noise(np.einsum("hd,nhd->hn", self.q, self.keys))
        self.h = self.noise(self.first.times(self.z)) if self.first else self.z
        self.a = self.noise(self._activate(self.h), may_underflow=True)
        self.w = self.second.times_transposed(self.a) if self.second else self.a
        if extremes is not None:
            self._measure(extremes)

    def _activate(self, h):
        kind, eps = self.inputs.activation, self.inputs.eps
        if kind == "softmax":
            self.scale = self.q.shape[-1] ** -0.5
            e = np.exp((h - h.max(axis=-1, keepdims=True)) * self.scale)
            return e / e.sum(axis=-1, keepdims=True)
        heads = h.shape[0] // 2 if kind == "glu" else h.shape[0]
        self.heads = heads
        self.rho = norm(h[:heads], eps)
        self.unit = np.maximum(h[:heads], 0.0) / self.rho
        return self.unit if kind == "relu" else softplus(h[heads:]) * self.unit

    def _measure(self, extremes):
        terms = np.einsum("hd,nhd->hn", np.abs(self.q), np.abs(self.keys))
        extremes.see(terms)
        extremes.see(self.z)
        terms = self.first.terms(terms) if self.first else terms
        extremes.see(terms)
        extremes.see(self.h)
        if self.inputs.activation != "softmax":
            extremes.see(self.rho)
            extremes.largest = max(extremes.largest, float((self.rho**2).max()))
            extremes.see_kink(self.h[: self.heads], terms[: self.heads])
        extremes.see(self.a)
        extremes.see(self.w)

    def output(self):
        """Return ``[H, Dv]``."""
        if self.empty:
            return np.zeros(self.inputs.v.shape[2:])
        terms = np.einsum("hn,nhd->hd", np.abs(self.w), np.abs(self.values))
        return self.noise(np.einsum("hn,nhd->hd", self.w, self.values), terms)

    def add_gradients(self, do, grads, extremes=None):
        """Add this query's part of all gradients; ``do``: ``[H, Dv]``, the gradient of its output."""
        if self.empty:
            return
        dw = self.noise(np.einsum("hd,nhd->hn", do, self.values))
        grads["v"][self.b, self.seen] += self.w.T[:, :, None] * do
        da = dw
        if self.second:
            da = self.noise(self._through_second(dw, grads), self.second.terms(dw))
        dz = dh = self._through_activation(da)
        if self.first:
            dz = self.noise(self._through_first(dh, grads), self.first.terms(dh, transposed=True))
        if extremes is not None:
            row_factors = [] if self.inputs.activation == "softmax" else [self.along / self.rho**2]
            for x in (dw, da, dh, dz, *row_factors):
                extremes.see(x)
        grads["q"][self.b, self.i] += np.einsum("hn,nhd->hd", dz, self.keys)
        grads["k"][self.b, self.seen] += dz.T[:, :, None] * self.q

    def _through_second(self, g, grads):
        """Gradient of a in w = a R2ᵀ, given that of w."""
        mix, n = self.second, len(self.seen)
        back, inner_g = low_rank(g, mix.left, mix.right, mix.gate)
        inner_y = np.einsum("hn,hnr->hr", self.a, mix.right)
        grads["mix2.diag"][:, :n] += self.a * g
        grads["mix2.left"][:, :n] += g[:, :, None] * (inner_y * mix.gate)[:, None]
        grads["mix2.right"][:, :n] += self.a[:, :, None] * (inner_g * mix.gate)[:, None]
        grads["mix2.gate"][self.b, self.i] += inner_g * inner_y
        return g * mix.diag + back

    def _through_first(self, g, grads):
        """Gradient of z in h = z R1, given that of h."""
        mix, n = self.first, len(self.seen)
        back, inner_g = low_rank(g, mix.right, mix.left, mix.gate)
        inner_y = np.einsum("hn,hnr->hr", self.z, mix.left)
        grads["mix1.diag"][:, :n] += self.z * g
        grads["mix1.left"][:, :n] += self.z[:, :, None] * (inner_g * mix.gate)[:, None]
        grads["mix1.right"][:, :n] += g[:, :, None] * (inner_y * mix.gate)[:, None]
        grads["mix1.gate"][self.b, self.i] += inner_g * inner_y
        return g * mix.diag + back

    def _through_activation(self, da):
        if self.inputs.activation == "softmax":
            mean = (da * self.a).sum(axis=-1, keepdims=True)
            terms = np.abs(da) + np.abs(da * self.a).sum(axis=-1, keepdims=True)
            return self.scale * self.a * self.noise(da - mean, terms)
        gate, scale = self.h[: self.heads], self.h[self.heads :]
        dunit = da
        if self.inputs.activation == "glu":
            dunit = da * self.noise(softplus(scale), may_underflow=True)
        self.along = (dunit * self.unit).sum(axis=-1, keepdims=True)
        terms = np.abs(dunit * self.unit).sum(axis=-1, keepdims=True)
        straight = np.where(gate > 0, dunit, 0.0) / self.rho
        dgate = straight - gate * (self.along / self.rho) / self.rho
        dgate = self.noise(dgate, np.abs(straight) + np.abs(gate) * (terms / self.rho) / self.rho)
        if self.inputs.activation == "relu":
            return dgate
        slope = self.noise(sigmoid(scale), may_underflow=True)
        return np.concatenate([dgate, da * self.unit * slope])


def attention_and_gradients(inputs: Inputs, do, extremes=None, back_extremes=None, noise=None):
    """Return the output and the gradients of <do, output>, a dict with the names of ``Inputs.arrays``.

    ``noise`` is applied to intermediate results, to see how much they matter.
    """
    grads = {name: np.zeros_like(x) for name, x in inputs.arrays().items()}
    out = np.zeros(do.shape)
    for b in range(do.shape[0]):
        for i in range(do.shape[1]):
            query = Query(inputs, b, i, extremes, noise)
            out[b, i] = query.output()
            query.add_gradients(do[b, i], grads, back_extremes)
    return out, grads
