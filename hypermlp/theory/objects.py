"""The paper's objects of one step, as matrices built from a layer's parameters, and the operator's results.

Symbols are the paper's. Rows of X are in slot order (layout "lag": newest first). Shapes: D hidden size, t
rows of context, r rank. A *branch* has scores of its own (HyperGLU: H gate branches, then H scale branches);
a head reads out.

In the paper a query x and a context X are independent arguments. So they are here: ``Step(layer, X).real(x)``
is the output of the layer's projections and the operator for x as the newest query over X. x need not be a
row of X.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers.internals import convolved, gate_parameters, gate_values
from hypermlp.layers.mixer import Mixer
from hypermlp.ops import Mix, hyper_attention
from hypermlp.testing import randomise_

SIZES = {"hidden_size": 16, "max_length": 16, "rank": 3}
STD = 0.7  # far from the initialisation, so that every parameter matters
T = 9  # rows of context, unless a check needs another number
ACTIVATION = {"R": "relu", "G": "glu"}
BRANCHES = {"R": 1, "G": 2}  # of one head


def full(base: str) -> str:
    """Return the label of HyperMLP or HyperGLU."""
    return f"{base}-cg-q-12o"


def random_layer(label: str, *, seed: int = 0, static: bool = False, **settings: Any) -> Mixer:
    """Return a float64 layer with random parameters; with ``static`` no gate depends on the input."""
    layer = Mixer(MixerConfig.from_label(label, **(SIZES | settings))).double().requires_grad_(False)
    randomise_(layer, seed=seed, scale=STD)
    if static:
        for weight in gate_parameters(layer)[0].values():
            weight.zero_()
    return layer


def random_rows(count: int, width: int = SIZES["hidden_size"], *, seed: int = 1) -> Tensor:
    """Return rows of standard normal numbers."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_query(*, seed: int) -> Tensor:
    """Return one row of standard normal numbers."""
    return random_rows(1, seed=seed)[0]


def times(x: Tensor, *matrices: Tensor) -> Tensor:
    """Return ``x`` ``[..., n]`` times ``[..., n, m]`` matrices, one after the other."""
    for matrix in matrices:
        x = (x[..., None, :] @ matrix)[..., 0, :]
    return x


def attend(
    q: Tensor, k: Tensor, values: Tensor, mix1: Mix | None = None, mix2: Mix | None = None, **settings: Any
) -> Tensor:
    """Call the operator; q, keys and values may have batch size 1 beside others.

    Raises FloatingPointError for a non-finite result, which ``weights > 0`` and the like would hide.
    """
    batch = max(map(len, (q, k, values)))
    q, k, values = (y.expand(batch, -1, -1, -1) for y in (q, k, values))
    out = hyper_attention(q, k, values, mix1, mix2, **settings)
    if not out.isfinite().all():
        raise FloatingPointError("the operator returned a non-finite number")
    return out


class Step:
    """One step of ``layer`` over the context ``X`` ``[t, D]``, oldest row first.

    Methods named after the paper's symbols evaluate its formulas. Methods named ``real...`` and ``active``
    return the operator's results. All take a query x ``[D]``, or many at once, ``[..., D]``: the result then
    has the same leading dimensions. The shapes below are those for one query.
    """

    def __init__(self, layer: Mixer, X: Tensor):
        config = layer.config
        if config.rope:
            raise UserError("the label has p (RoPE), which makes L(1) depend on positions; use one without p")
        self.layer, self.config, self.t, self.newest = layer, config, len(X), X[-1]
        key_rows, value_rows = convolved(layer, X[None])
        self.keys = layer.k_proj(key_rows).unflatten(-1, (config.num_branches, config.qk_dim))
        self.values = layer.v_proj(value_rows).unflatten(-1, (config.num_heads, config.vo_dim))
        self.X1, self.X2 = self._by_slot(key_rows[0], 0), self._by_slot(value_rows[0], 0)

    def _by_slot(self, by_key: Tensor, dim: int) -> Tensor:
        return by_key if self.config.layout == "forward" else by_key.flip(dim)

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gates at x by name; "query" and "output" are ones in a layer without feature gates."""
        widths = {"query": self.config.qk_width, "output": self.config.vo_width}
        return {name: x.new_ones(width) for name, width in widths.items()} | gate_values(self.layer, x)

    def mix(self, x: Tensor, which: int) -> Mix | None:
        """Return the first or second mix with its gate at x, as the operator takes it."""
        mix = (self.layer.mix1, self.layer.mix2)[which - 1]
        if mix is None:
            return None
        return mix(self.gates(x)[f"mix{which}"].view(-1, 1, len(mix.diag), self.config.rank))

    def R(self, x: Tensor, which: int, index: int = 0) -> Tensor:
        """``[t, t]``: I + Diag(p) + A Diag(s(x)) Bᵀ of a branch (first mix) or head (second mix)."""
        mix = self.mix(x, which)
        if mix is None:
            return torch.eye(self.t, dtype=x.dtype)
        p, A, B = (part[index, : self.t] for part in mix[:3])
        R = torch.diag(1 + p) + A * mix.gate[:, :, index] @ B.T
        return R.view(*x.shape[:-1], self.t, self.t)

    def L1(self, x: Tensor, branch: int = 0) -> Tensor:
        """``[D, D]``: W_q M(1)(x) W_kᵀ"""
        rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
        W_q, W_k = self.layer.q_proj.weight[rows].T, self.layer.k_proj.weight[rows].T
        return W_q * self.gates(x)["query"][..., None, rows] @ W_k.T

    def L2T(self, x: Tensor, head: int = 0) -> Tensor:
        """``[D, D]``: W_v M(2)(x) W_oᵀ"""
        rows = slice(head * self.config.vo_dim, (head + 1) * self.config.vo_dim)
        W_v, W_o = self.layer.v_proj.weight[rows].T, self.layer.o_proj.weight[:, rows]
        return W_v * self.gates(x)["output"][..., None, rows] @ W_o.T

    def W1(self, x: Tensor, branch: int = 0) -> Tensor:
        """``[D, t]``: the instantiated first layer."""
        return self.L1(x, branch) @ self.X1.T @ self.R(x, 1, branch)

    def W2(self, x: Tensor, head: int = 0) -> Tensor:
        """``[t, D]``: the instantiated second layer."""
        return self.R(x, 2, head).mT @ self.X2 @ self.L2T(x, head)

    def h(self, x: Tensor, branch: int = 0) -> Tensor:
        """``[t]``: the hidden pre-activation."""
        return times(x, self.W1(x, branch))

    def rho(self, x: Tensor, head: int = 0) -> Tensor:
        """``[1]``: the norm that divides the pre-activation of a head."""
        return (self.h(x, head).square().sum(-1, keepdim=True) + self.config.eps).sqrt()

    def strength(self, x: Tensor, head: int = 0) -> Tensor:
        """``[t]``: HyperGLU's positive factor of every slot; ones for HyperMLP."""
        if self.config.activation != "glu":
            return x.new_ones(self.t)
        scale = self.h(x, self.config.num_heads + head)
        return torch.logaddexp(scale, torch.zeros_like(scale))

    def sigma(self, x: Tensor, head: int = 0) -> Tensor:
        """``[t]``: the hidden activation."""
        return self.strength(x, head) * (self.h(x, head) / self.rho(x, head)).clamp(min=0)

    def o(self, x: Tensor) -> Tensor:
        """``[D]``: the output, a sum of two-layer MLPs over the heads."""
        heads = range(self.config.num_heads)
        return torch.stack([times(self.sigma(x, head), self.W2(x, head)) for head in heads]).sum(0)

    def operator(self, x: Tensor, *, mixed: bool = True) -> "partial[Tensor]":
        """Return the operator for the query x as a function of the values ``[1, t, H, width]``.

        It returns ``[queries, 1, H, width]``. Without ``mixed`` it leaves out the second mix.
        """
        config, gate = self.config, self.gates(x)["query"]
        q = (self.layer.q_proj(x) * gate).view(-1, 1, config.num_branches, config.qk_dim)
        return partial(
            attend,
            q,
            self.keys,
            mix1=self.mix(x, 1),
            mix2=self.mix(x, 2) if mixed else None,
            activation=config.activation,
            layout=config.layout,
            eps=config.eps,
        )

    def real(self, x: Tensor) -> Tensor:
        """``[D]``: the output, by the layer's projections and the operator."""
        heads = self.operator(x)(self.values).view(*x.shape[:-1], -1)
        return self.layer.o_proj(heads * self.gates(x)["output"])

    def real_unnormalised(self, x: Tensor) -> Tensor:
        """``[D]``: the output times rho, of a layer with one head."""
        return self.rho(x) * self.real(x)

    def real_weights(self, x: Tensor, *, mixed: bool = True) -> Tensor:
        """``[H, t]`` in slot order: the operator's readout weights, found with unit vectors as values."""
        units = torch.eye(self.t, dtype=x.dtype)[None, :, None].expand(-1, -1, self.config.num_heads, -1)
        return self._by_slot(self.operator(x, mixed=mixed)(units).view(*x.shape[:-1], -1, self.t), -1)

    def real_activation(self, x: Tensor) -> Tensor:
        """``[H, t]``: the operator's activation, before the second mix."""
        return self.real_weights(x, mixed=False)

    def real_h(self, x: Tensor, head: int = 0) -> Tensor:
        """``[t]``: the operator's pre-activation where it is positive; its activation shows no more."""
        return self.real_activation(x)[..., head, :] / self.strength(x, head) * self.rho(x, head)

    def active(self, x: Tensor) -> Tensor:
        """bool ``[t]``: the slots that the operator activates in the first head."""
        return self.real_activation(x)[..., 0, :] > 0


def random_step(label: str, rows: int = T, **settings: Any) -> Step:
    """Return a step of a random layer (see ``random_layer``) over random rows."""
    layer = random_layer(label, **settings)
    return Step(layer, random_rows(rows, layer.config.hidden_size))
