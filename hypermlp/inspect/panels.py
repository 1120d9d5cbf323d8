"""The numbers that the pictures show, for one prompt and every layer that has a memory pool.

Shapes: T positions (registers first), S slots, r rank, D hidden size, Dk width of a query.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.inspect.capture import Capture, capture_model
from hypermlp.layers.internals import Kernels, gate_parameters, kernels

BINS = 24  # of the histograms of gates
ROUTED = 24  # slots on the routing map: with more, their borders could not be told apart
REACH = 1.5  # half the width of the routing map, in distances of the farthest row of context


@dataclass(frozen=True)
class Routing:
    """The pre-activations of the slots on a plane of inputs, ``x + a u + b v`` with a and b between -1 and 1.

    The first dimension of ``query``, the gates and ``plane`` is x, u, v; a gate is the sigmoid of its
    combination.
    """

    query: Tensor  # [3, Dk]
    query_gate: Tensor | None  # [3, Dk]
    keys: Tensor  # [S, Dk], in slot order
    mix_gate: Tensor | None  # [3, r]
    kernels: Kernels | None
    plane: Tensor  # [3, D]
    step: int


@dataclass(frozen=True)
class Head:
    """One head of one layer. Registers make no queries: their rows are zero."""

    activation: Tensor  # [T, S], in slot order
    active: Tensor  # bool [T, S]
    contribution: Tensor  # [T, T]: row t holds the length of the vector that each token adds to the output
    mixes: dict[str, Kernels]  # by the names that are shown
    routing: Routing | None


@dataclass(frozen=True)
class Layer:
    index: int
    activation: str
    layout: str
    heads: list[Head]
    gates: dict[str, Tensor]  # [BINS]: histograms of the values between 0 and 1

    @property
    def selects(self) -> bool:
        """True if the activation switches slots off, which softmax does not."""
        return self.activation != "softmax"


@dataclass(frozen=True)
class Panels:
    tokens: list[str]
    registers: int
    layers: list[Layer]
    baselines: list[int]
    """Indices of the layers that are baselines, which have no memory pool."""


@torch.no_grad()
def panels(model: Any, tokenizer: Any, prompt: str, tokens: int | None = None) -> Panels:
    """Read ``prompt``, or its first ``tokens`` tokens, with the model and return its layers' numbers."""
    ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    limit = model.config.max_position_embeddings
    if not 2 <= len(ids) <= limit:
        raise UserError(
            f"the prompt has {len(ids)} tokens; allowed: 2 to {limit}, the model's context"
            + ("; --tokens reads only the first ones" if len(ids) > limit else "")
        )
    captures = dict(enumerate(capture_model(model, torch.tensor([ids], device=model.device))))
    seen = {index: capture for index, capture in captures.items() if capture is not None}
    if not seen:
        raise UserError(
            f"no layer of this model has a memory pool ({', '.join(dict.fromkeys(model.config.mixers))}); "
            "allowed: a model with at least one layer of a label, such as G-cg-q-12o"
        )
    registers = next(iter(seen.values())).config.num_registers
    texts = [f"register {i + 1}" for i in range(registers)] + [tokenizer.decode([i]) for i in ids]
    layers = [layer_panel(index, capture) for index, capture in seen.items()]
    return Panels(texts, registers, layers, [index for index in captures if index not in seen])


def layer_panel(index: int, seen: Capture) -> Layer:
    config, sizes, first = seen.config, seen.contribution_sizes(), seen.config.num_registers
    if not (sizes.isfinite().all() and seen.trace.pre_activation.isfinite().all()):
        raise UserError(
            f"layer {index + 1} computes numbers that are not finite: the checkpoint is damaged, "
            "or its training diverged; use another one"
        )
    queries = torch.arange(sizes.shape[1], device=sizes.device)[:, None] >= first

    def head_panel(head: int) -> Head:
        first_mixes = {"R1": head}
        if config.activation == "glu":
            first_mixes = {"R1, selecting": head, "R1, strength": config.num_heads + head}
        length, (mix1, mix2) = len(sizes[head]), (seen.heads.mix1, seen.heads.mix2)
        mixes = {name: kernels(mix1, branch, length) for name, branch in first_mixes.items()}
        mixes["R2"] = kernels(mix2, head, length)
        return Head(
            seen.trace.activation[0, head] * queries,
            seen.active[0, head] & queries,
            sizes[head] * queries,
            {name: mix for name, mix in mixes.items() if mix is not None},
            None if config.activation == "softmax" else _routing(seen, head),
        )

    heads = [head_panel(head) for head in range(config.num_heads)]
    values = {name: gate[:, first:].float() for name, gate in seen.gates.items()}
    gates = {name: torch.histc(gate, BINS, 0, 1) / gate.numel() for name, gate in values.items()}
    return Layer(index, config.activation, config.layout, heads, gates)


def _routing(seen: Capture, head: int) -> Routing:
    """Return the routing at a step with few slots, on the plane along which its context varies most."""
    config = seen.config
    step = min(config.num_registers + ROUTED, seen.inputs.shape[1]) - 1
    rows = seen.inputs[0, : step + 1].to(seen.heads.q.dtype)
    directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:2]
    reach = REACH * (rows - rows[-1]).norm(dim=-1).max()
    plane = torch.stack([rows[-1], *(directions * reach)])  # [3, D]
    weights, biases = gate_parameters(seen.layer)

    def logits(gate: str, width: int) -> Tensor | None:
        """Return what the sigmoid is applied to; the bias counts once, at x."""
        if gate not in weights:
            return None
        part = slice(head * width, (head + 1) * width)
        bias = torch.nn.functional.pad(biases[gate][None, part], (0, 0, 0, 2))
        return plane @ weights[gate][:, part].to(plane.dtype) + bias

    return Routing(
        query=plane @ seen.address(head, step),
        query_gate=logits("query", config.qk_dim),
        keys=seen.by_slot(seen.heads.k[0, :, head], step),
        mix_gate=logits("mix1", config.rank),
        kernels=kernels(seen.heads.mix1, head, step + 1),
        plane=plane,
        step=step,
    )


def pre_activations(routing: Routing, where: Tensor, dynamic: float = 1.0) -> Tensor:
    """Return the pre-activations ``[n, S]`` at points ``[n, 2]`` of the plane.

    The gates follow the input by the factor ``dynamic``: 1 is the layer, 0 holds them as they are at x.
    """
    ones = torch.ones(len(where), 1, dtype=where.dtype, device=where.device)
    at, gates_at = (torch.cat([ones, factor * where], dim=1) for factor in (1.0, dynamic))  # [n, 3]
    query = at @ routing.query
    if routing.query_gate is not None:
        query = query * torch.sigmoid(gates_at @ routing.query_gate)
    scores, mix = query @ routing.keys.T, routing.kernels
    if mix is None or routing.mix_gate is None:
        return scores
    low_rank = scores @ mix.left * torch.sigmoid(gates_at @ routing.mix_gate)
    return scores * (1 + mix.diag) + low_rank @ mix.right.T
