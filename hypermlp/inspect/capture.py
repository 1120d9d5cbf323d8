"""What a layer computes for an input: its memory, instantiated and activated, step by step.

A capture calls the layer's own projections and the operator's definition. The layer is not changed.

Shapes: B batch, T positions, D hidden size, H heads, S slots (as many as positions), K keys (as many as
positions).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers.internals import convolved, kernels, operands, rotated
from hypermlp.layers.mixer import Mixer
from hypermlp.ops.arguments import Attention
from hypermlp.ops.layout import slot_maps
from hypermlp.ops.reference import Trace, trace
from hypermlp.validation import require


@dataclass(frozen=True)
class Capture:
    """Every intermediate result of one layer on one input; ``capture`` returns it.

    Letters: B sequences, T positions, D hidden size, H heads, G branches (2 H for "glu": head j has gate
    branch j and scale branch H + j; otherwise H), S = T slots, K = T keys, Dk and Dv widths of a branch and a
    head, n the number of slots that exist at a position. Positions and slots count from 0. In layout "lag",
    slot i of position t is key t - i; in "forward", slot i is the i-th visible key. With registers, the first
    ``config.num_registers`` positions (and keys) are the registers, so input t is position num_registers + t.
    Methods take a position ``t`` and the index ``batch`` of a sequence (0). Attributes are detached. Methods
    that use the layer's weights return tensors with gradients to these weights.

    Attributes:
        layer: the layer.
        inputs: ``[B, T, D]``, the input, behind the registers, with zeros in place of padding.
        heads: the arguments of the operator: gated and rotated queries q ``[B, T, G, Dk]``, keys k ``[B, T,
            G, Dk]``, values v ``[B, T, H, Dv]``, mix1, mix2 (``Mix`` or None) and starts.
        trace: what the operator computes, in slot order: ``scores`` and ``pre_activation`` (the scores after
            R1, before the norm) ``[B, G, T, S]``, ``activation`` and ``weights`` (after R2) ``[B, H, T, S]``,
            ``weights_of_keys`` ``[B, H, T, K]``, ``exists`` (which slots exist) bool ``[B or 1, 1, T, S]``
            and ``output`` ``[B, T, H, Dv]``. Values are 0 in slots that do not exist.
        gates: the sigmoid gates that the layer has, by name: "query" ``[B, T, G Dk]``, "output" ``[B, T, H
            Dv]``, "mix1" ``[B, T, G rank]``, "mix2" ``[B, T, H rank]``.

    Example::

        import torch
        from hypermlp import HyperGLU
        from hypermlp.inspect import capture

        layer, x = HyperGLU(64, max_length=128), torch.randn(1, 20, 64)
        seen = capture(layer, x)
        weights = seen.trace.weights_of_keys[0, :, 19]  # [heads, 20]: the weights of all keys at position 19
        W1, W2 = seen.first_layer(0, t=19), seen.second_layer(0, t=19)  # the dynamic MLP: [64, 20], [20, 64]
        torch.testing.assert_close(x[0, 19] @ W1, seen.trace.pre_activation[0, 0, 19], rtol=1e-3, atol=1e-4)
    """

    layer: Mixer
    inputs: Tensor
    heads: Attention
    trace: Trace
    gates: dict[str, Tensor]

    @property
    def config(self) -> MixerConfig:
        """The ``MixerConfig`` of the layer."""
        return self.layer.config

    @property
    def starts(self) -> Tensor | None:
        """int64 ``[B, T]``: the first position that each position sees; None if every position sees from 0
        on.
        """
        return self.heads.starts

    @property
    def active(self) -> Tensor:
        """bool ``[B, H, T, S]``: which slots have a positive activation, the activated memory.

        For "softmax" these are all slots that exist. Slots that do not exist are False.
        """
        if self.config.activation == "softmax":
            return self.trace.exists.expand(self.trace.activation.shape)
        return self.trace.pre_activation[:, : self.config.num_heads] > 0

    @property
    def rho(self) -> Tensor:
        """``[B, H, T]``: sqrt(‖h‖² + eps), by which "relu" and "glu" divide the (gate) pre-activations h.

        "softmax" does not use it.
        """
        gate = self.trace.pre_activation[:, : self.config.num_heads]
        return (gate.square().sum(-1) + self.config.eps).sqrt()

    @property
    def key_of_slot(self) -> Tensor:
        """int64 ``[B or 1, T, S]``: the key in each slot; only meaningful where ``trace.exists``."""
        length = self.inputs.shape[1]
        return slot_maps(self.config.layout, self.starts, length, length, self.inputs.device)[0]

    def width(self, t: int, batch: int = 0) -> int:
        """Return n, the number of slots that exist at position t."""
        return int(_of_batch(self.trace.exists, batch)[0, t].sum())

    def by_slot(self, by_key: Tensor, t: int, batch: int = 0) -> Tensor:
        """Select from rows ``[K, m]``, one for each key, those of the slots at position t: ``[n, m]``, in
        slot order.
        """
        return by_key[_of_batch(self.key_of_slot, batch)[t, : self.width(t, batch)]]

    def mix(self, which: int, index: int, t: int, batch: int = 0) -> Tensor:
        """Return R ``[n, n]`` at position t; the identity where there is no mix.

        Args:
            which: 1 for R1, 2 for R2.
            index: the branch (R1) or head (R2).
            t: the position.
            batch: the sequence (0).
        """
        require("which", which, which in (1, 2), "1 or 2")
        slots = self.width(t, batch)
        identity = torch.eye(slots, dtype=self.heads.q.dtype, device=self.inputs.device)
        mix = kernels((self.heads.mix1, self.heads.mix2)[which - 1], index, slots, batch)
        return identity if mix is None else identity + mix.added(t)

    def address(self, branch: int, t: int, batch: int = 0) -> Tensor:
        """Return W_q of a branch ``[D, Dk]``, rotated to position t (with RoPE) but not gated."""
        rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
        weight = self.layer.q_proj.weight[rows].T.to(self.heads.q.dtype)
        return rotated(self.layer, weight, t, None if self.starts is None else self.starts[batch])

    def first_layer(self, branch: int, t: int, batch: int = 0) -> Tensor:
        """Return W1 ``[D, n]`` of a branch: ``inputs[batch, t] @ W1`` is ``trace.pre_activation[batch,
        branch, t, :n]``.

        It holds for layers without canon.
        """
        address = self.address(branch, t, batch)
        if "query" in self.gates:
            rows = slice(branch * self.config.qk_dim, (branch + 1) * self.config.qk_dim)
            address = address * self.gates["query"][batch, t, rows]
        keys = self.by_slot(self.heads.k[batch, :, branch], t, batch)
        return address @ keys.T @ self.mix(1, branch, t, batch)

    def second_layer(self, head: int, t: int, batch: int = 0) -> Tensor:
        """Return W2 ``[n, D]`` of a head: ``trace.activation[batch, head, t, :n] @ W2``, summed over heads,
        is the layer's output at position t.
        """
        values = self.by_slot(self.heads.v[batch, :, head], t, batch)
        return self.read_out(self.mix(2, head, t, batch).T @ values, head, t, batch)

    def pool(self, head: int, t: int, batch: int = 0) -> tuple[Tensor, Tensor]:
        """Return the memory pool of a head at position t: U and V, both ``[n, D]``.

        Row i of U (of V) is what slot i offers to the key (value) projection: the context's convolved rows,
        mixed by R1 of the branch with the number ``head`` (by R2). With RoPE or canon, the keys are not a
        projection of U.
        """
        rows = convolved(self.layer, self.inputs, self.starts)
        slots = (self.by_slot(slot_rows[batch], t, batch).to(self.heads.q.dtype) for slot_rows in rows)
        U, V = (self.mix(which, head, t, batch).T @ slot_rows for which, slot_rows in enumerate(slots, 1))
        return U, V

    def contributions(self, t: int, batch: int = 0) -> Tensor:
        """Return what the value of every key adds to the layer's output at position t, ``[H, K, D]``; the sum
        over heads and keys is the output.

        All weights and gates keep their values: given these, a head is linear in its values, and the sum is
        exact. With a convolution, the value of key k comes from the inputs k - conv_kernel + 1 to k.
        """
        weighted = self.trace.weights_of_keys[batch, :, t, :, None] * self.heads.v[batch].transpose(0, 1)
        return torch.stack([self.read_out(values, head, t, batch) for head, values in enumerate(weighted)])

    def contribution_sizes(self, batch: int = 0) -> Tensor:
        """Return the Euclidean norms of the contributions, ``[H, T, K]``."""
        steps = range(self.inputs.shape[1])
        return torch.stack([self.contributions(t, batch).norm(dim=-1) for t in steps], dim=1)

    def read_out(self, values: Tensor, head: int, t: int, batch: int = 0) -> Tensor:
        """Pass values ``[m, Dv]`` of a head through its output gate at position t and W_o: ``[m, D]``."""
        rows = slice(head * self.config.vo_dim, (head + 1) * self.config.vo_dim)
        gate = self.gates.get("output")
        gated = values if gate is None else values * gate[batch, t, rows]
        return gated @ self.layer.o_proj.weight[:, rows].T.to(values.dtype)


def _of_batch(x: Tensor, batch: int) -> Tensor:
    """Return the entry of a batch element in a tensor ``[B or 1, ...]``."""
    return x[min(batch, len(x) - 1)]


@torch.no_grad()
def capture(layer: nn.Module, x: Tensor, *, starts: Tensor | None = None) -> Capture:
    """Compute ``layer(x, starts=starts)`` and return every intermediate result.

    The results are detached, in float32 or better, and take memory proportional to B H T².

    Args:
        layer: a ``Mixer``, such as ``HyperGLU``, on any device.
        x: ``[B, T, D]``.
        starts: as for the layer; None with registers.

    Returns:
        a ``Capture``. ``seen.trace.scores``, ``seen.trace.pre_activation`` ``[B, branches, T, T]`` and
        ``seen.trace.activation`` ``[B, heads, T, T]`` are in slot order.

    Raises:
        UserError: for a baseline, for a layer with adapters or hooks, for ``starts`` with registers, and for
            what the layer refuses.

    Example::

        import torch
        from hypermlp import HyperGLU
        from hypermlp.inspect import capture

        layer, x = HyperGLU(64, max_length=128), torch.randn(1, 20, 64)
        seen = capture(layer, x)
        count = seen.active.sum(-1)  # [1, heads, 20]: the number of active slots at each position
        output = seen.contributions(t=19).sum((0, 1))  # the layer's output at position 19
        torch.testing.assert_close(output, layer(x)[0, 19].detach(), rtol=1e-3, atol=1e-4)
    """
    if not isinstance(layer, Mixer):
        raise UserError(
            f"{type(layer).__name__} has no memory pool; allowed: a layer of a label, such as HyperGLU"
        )
    inputs, arguments, gates = operands(layer, x, starts)
    return Capture(layer, inputs, arguments, trace(arguments), gates)


@torch.no_grad()
def capture_model(model: Any, input_ids: Tensor, **inputs: Any) -> list[Capture | None]:
    """Capture every layer of a language model while it reads ``input_ids`` ``[B, T]``.

    Args:
        model: a ``HyperMLPForCausalLM``.
        input_ids: tokens ``[B, T]``.
        inputs: further arguments of the model, such as ``attention_mask``.

    Returns:
        a list with one ``Capture`` for each layer, None for a baseline.

    Raises:
        UserError: as for ``capture``.

    Example::

        import torch
        from hypermlp.inspect import capture_model
        from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

        sizes = dict(hidden_size=64, num_hidden_layers=2, max_position_embeddings=128, vocab_size=257)
        model = HyperMLPForCausalLM(HyperMLPConfig(**sizes))
        first, second = capture_model(model, torch.randint(0, 257, (1, 20)))
        print(first.active.float().mean())  # share of active slots in the first layer
    """
    seen: list[Capture | None] = []

    def look(mixer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        starts = named["visibility"].starts
        seen.append(capture(mixer, given[0], starts=starts) if isinstance(mixer, Mixer) else None)

    hooks = [block.mixer.register_forward_pre_hook(look, with_kwargs=True) for block in model.model.layers]
    try:
        model(input_ids, use_cache=False, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
