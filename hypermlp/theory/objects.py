"""The paper's objects of one step, as matrices, built from a layer's parameters: what the operator is measured against.

Symbols are the paper's. Rows of X are in slot order (layout "lag": newest first). Shapes: D hidden size, t rows of context,
r rank. A *branch* has scores of its own (HyperGLU: gates first, then scales); a head reads out.

In the paper a query x and a context X are independent arguments, and so they are here: ``Step(layer, X).real(x)`` asks the layer's
own projections and the operator for x as the newest query over the context X, of which it may be the newest row or not.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers import mixer as layers
from hypermlp.layers.mixer import Mixer
from hypermlp.ops.api import causal_conv_pair
from hypermlp.ops.arguments import Mix
from hypermlp.theory.check import NotFiniteError

SIZES = {"hidden_size": 16, "max_length": 16, "rank": 3}
STD = 0.7  # far from the initialisation, so that everything matters


def random_layer(label: str, *, seed: int = 0, static: bool = False, **settings: Any) -> Mixer:
    """In float64, with parameters of everyday size. ``static``: no gate depends on the input."""
    generator = torch.Generator().manual_seed(seed)
    layer = Mixer(MixerConfig.from_label(label, **(SIZES | settings))).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if static and layer.gates is not None:
            layer.gates.weight.zero_()
    return layer.requires_grad_(False)


def random_rows(count: int, width: int = SIZES["hidden_size"], *, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    mix1: Mix | None,
    mix2: Mix | None,
    *,
    activation: str,
    layout: str = "lag",
    eps: float = 1e-12,
    backend: str = "auto",
    starts: Tensor | None = None,
) -> Tensor:
    """The operator that layers call, whichever that is: tests plant broken ones there."""
    operator = layers.attend  # type: ignore[attr-defined]
    out: Tensor = operator(
        q, k, values, mix1, mix2, starts, activation=activation, layout=layout, eps=eps, backend=backend
    )
    if not out.isfinite().all():
        raise NotFiniteError
    return out


class Gates(NamedTuple):
    """At one x: on the queries and on the head outputs, and in the mixes."""

    query: Tensor  # [qk width]
    output: Tensor  # [vo width]
    mix1: Tensor  # [branches, r]
    mix2: Tensor  # [heads, r]


class Step:
    """One step over a context ``X`` ``[t, D]`` in stream order, oldest row first."""

    def __init__(self, layer: Mixer, X: Tensor):
        if layer.config.rope:
            raise UserError("RoPE makes L(1) depend on positions; take a label without p")
        self.layer, self.config, self.t = layer, layer.config, X.shape[0]
        keys = values = X[None]
        if layer.k_conv is not None and layer.v_conv is not None:
            keys, values = causal_conv_pair(keys, layer.k_conv, layer.v_conv, self.t, backend="reference")
        self._keys_from, self._values_from = keys, values
        order = slice(None) if layer.config.layout == "forward" else torch.arange(self.t - 1, -1, -1)
        self.X1, self.X2 = (
            keys[0][order],
            values[0][order],
        )  # rows that the first and the second layer are made of

    def gates(self, x: Tensor) -> Gates:
        config, layer = self.config, self.layer
        ones = [torch.ones(size, dtype=x.dtype) for size in (config.qk_width, config.vo_width)]
        found = layer.gates
        parts = (
            [x.new_zeros(0)] * 4 if found is None else list(torch.sigmoid(found(x)).split(layer.gate_sizes))
        )
        query, output = parts[:2] if config.feature_gates else ones
        mix1, mix2 = (part.view(-1, config.rank) for part in parts[2:])
        return Gates(query, output, mix1, mix2)

    def L1(self, x: Tensor, branch: int) -> Tensor:
        """``[D, D]``: W_q M(1)(x) W_kᵀ"""
        rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
        return self.layer.q_proj.weight[rows].T * self.gates(x).query[rows] @ self.layer.k_proj.weight[rows]

    def L2T(self, x: Tensor, head: int) -> Tensor:
        """``[D, D]``: W_v M(2)(x) W_oᵀ"""
        rows = slice(head * self.config.vo_dim, (head + 1) * self.config.vo_dim)
        return (
            self.layer.v_proj.weight[rows].T
            * self.gates(x).output[rows]
            @ self.layer.o_proj.weight[:, rows].T
        )

    def R(self, x: Tensor, which: int, index: int) -> Tensor:
        """``[t, t]``: I + Diag(p) + A Diag(s(x)) Bᵀ of a branch (1) or head (2); the identity where there is no mix."""
        mix = (self.layer.mix1, self.layer.mix2)[which - 1]
        identity = torch.eye(self.t, dtype=x.dtype)
        if mix is None:
            return identity
        s = self.gates(x)[which + 1][index]
        p, A, B = (parameter[index, : self.t] for parameter in (mix.diag, mix.left, mix.right))
        return identity + torch.diag(p) + A * s @ B.T

    def W1(self, x: Tensor, branch: int) -> Tensor:
        """``[D, t]``: the first layer as instantiated."""
        return self.L1(x, branch) @ self.X1.T @ self.R(x, 1, branch)

    def W2(self, x: Tensor, head: int) -> Tensor:
        """``[t, D]``: the second layer as instantiated."""
        return self.R(x, 2, head).T @ self.X2 @ self.L2T(x, head)

    def h(self, x: Tensor, branch: int) -> Tensor:
        """``[t]``: the hidden pre-activation."""
        return x @ self.W1(x, branch)

    def rho(self, h: Tensor) -> Tensor:
        return (h.square().sum() + self.config.eps).sqrt()

    def strength(self, x: Tensor, head: int) -> Tensor | float:
        """HyperGLU's positive factor of every slot; 1 for HyperMLP."""
        if self.config.activation != "glu":
            return 1.0
        scale = self.h(x, self.config.num_heads + head)
        return torch.logaddexp(scale, torch.zeros_like(scale))

    def sigma(self, x: Tensor, head: int) -> Tensor:
        """``[t]``: the hidden activation."""
        h = self.h(x, head)
        return self.strength(x, head) * (h / self.rho(h)).clamp(min=0)

    def o(self, x: Tensor) -> Tensor:
        """``[D]``: the output, the sum over heads of two-layer MLPs."""
        return torch.stack(
            [self.sigma(x, head) @ self.W2(x, head) for head in range(self.config.num_heads)]
        ).sum(0)

    def real(self, x: Tensor) -> Tensor:
        """``[D]``: what the layer's own projections and the operator say."""
        return self.layer.o_proj(self.operator(x, self.values()).flatten() * self.gates(x).output)

    def values(self) -> Tensor:
        """``[1, t, heads, width]``"""
        return self.layer.v_proj(self._values_from).unflatten(-1, (self.config.num_heads, self.config.vo_dim))

    def real_weights(self, x: Tensor, *, mixed: bool = True) -> Tensor:
        """``[heads, t]`` in slot order: the operator's own readout weights, by values that are unit vectors."""
        values = torch.eye(self.t, dtype=x.dtype)[:, None, :].expand(self.t, self.config.num_heads, self.t)[
            None
        ]
        weights = self.operator(x, values, mixed=mixed)[0, 0]
        return weights if self.config.layout == "forward" else weights.flip(-1)

    def operator(self, x: Tensor, values: Tensor, *, mixed: bool = True) -> Tensor:
        """``[1, 1, heads, width]``: the real one, for the query x."""
        return self.attend(*self.operands(x, mixed=mixed), values)

    def operands(self, x: Tensor, *, mixed: bool = True) -> tuple[Tensor, Tensor, Mix | None, Mix | None]:
        """Query, keys, mixes."""
        config, layer, gates = self.config, self.layer, self.gates(x)
        branches = (config.num_branches, config.qk_dim)
        q = (layer.q_proj(x) * gates.query).view(1, 1, *branches)
        k = layer.k_proj(self._keys_from).unflatten(-1, branches)
        mix1 = (
            None
            if layer.mix1 is None
            else Mix(layer.mix1.diag, layer.mix1.left, layer.mix1.right, gates.mix1[None, None])
        )
        mix2 = (
            None
            if layer.mix2 is None
            else Mix(layer.mix2.diag, layer.mix2.left, layer.mix2.right, gates.mix2[None, None])
        )
        return q, k, mix1, mix2 if mixed else None

    def attend(
        self, q: Tensor, k: Tensor, mix1: Mix | None, mix2: Mix | None, values: Tensor, **how: Any
    ) -> Tensor:
        config = self.config
        return attend(
            q,
            k,
            values,
            mix1,
            mix2,
            activation=config.activation,
            layout=config.layout,
            eps=config.eps,
            **how,
        )
