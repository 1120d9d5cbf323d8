"""What the pictures show, as numbers: of every layer that has a memory pool, for one prompt.

Shapes: T positions (registers first), H heads, S slots, r rank, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.inspect.capture import Capture, capture_model
from hypermlp.layers.rotary import rotate

BINS = 24
ROUTED = 24  # slots of the step whose routing is mapped: as many boundaries as can still be told apart
REACH = 1.5  # half the width of the map, in distances of the farthest row of context


@dataclass(frozen=True)
class Kernels:
    """One sequence mix of a head: ``R = I + Diag(diag) + left Diag(gate) rightᵀ``."""

    name: str
    diag: Tensor  # [S]
    left: Tensor  # [S, r]
    right: Tensor  # [S, r]
    gate: Tensor  # [T, r]


@dataclass(frozen=True)
class Routing:
    """The slots' pre-activations on a plane through an input: ``x + a u + b v`` for a and b between -1 and 1.

    Each of the linear parts has three rows: at x, along u, along v. Gates are sigmoids of theirs.
    """

    query: Tensor  # [3, Dk]
    query_gate: Tensor | None  # [3, Dk]
    keys: Tensor  # [S, Dk], in slot order
    mix_gate: Tensor | None  # [3, r]
    kernels: Kernels | None
    plane: Tensor  # [3, D]: x, u, v
    step: int


@dataclass(frozen=True)
class Head:
    """One head of one layer."""

    activation: Tensor  # [T, S], slot order; rows of registers, which ask nothing, are zero here and below
    active: Tensor  # bool [T, S]
    contribution: Tensor  # [T, T]: row t, how long the vector is that each token adds to the output
    mixes: list[Kernels]
    routing: Routing | None


@dataclass(frozen=True)
class Layer:
    index: int
    activation: str
    layout: str
    heads: list[Head]
    gates: dict[str, Tensor]  # [BINS]: shares of values between 0 and 1


@dataclass(frozen=True)
class Panels:
    tokens: list[str]
    registers: int
    layers: list[Layer]
    peers: list[int]
    """Layers without a pool."""


@torch.no_grad()
def panels(model: Any, tokenizer: Any, prompt: str, tokens: int | None = None) -> Panels:
    """Read ``prompt``, or so many tokens of it, with the model, and look."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"][:tokens]
    limit = model.config.max_position_embeddings
    if not 2 <= len(ids) <= limit:
        raise UserError(
            f"the prompt has {len(ids)} tokens; allowed: 2 to {limit}, the model's context; --tokens reads a part"
        )
    seen = capture_model(model, torch.tensor([ids], device=model.device))
    if all(each is None for each in seen):
        raise UserError(
            f"no layer of this model has a memory pool to look into ({', '.join(dict.fromkeys(model.config.mixers))})"
        )
    count = next(each.config.num_registers for each in seen if each is not None)
    texts = [f"register {i + 1}" for i in range(count)] + [tokenizer.decode([i]) for i in ids]
    layers = [layer_panel(index, each) for index, each in enumerate(seen) if each is not None]
    return Panels(texts, count, layers, [index for index, each in enumerate(seen) if each is None])


def layer_panel(index: int, seen: Capture) -> Layer:
    config, sizes, first = seen.config, seen.contribution_sizes(), seen.config.num_registers
    if not (torch.isfinite(sizes).all() and torch.isfinite(seen.trace.pre_activation).all()):
        raise UserError(
            f"layer {index + 1} computes numbers that are not finite; is the checkpoint damaged, or its training diverged?"
        )
    asked = torch.arange(len(seen.inputs[0]), device=sizes.device)[:, None] >= first
    heads = []
    for head in range(config.num_heads):
        branches = (
            [("R1, selecting", head), ("R1, strength", config.num_heads + head)]
            if config.activation == "glu"
            else [("R1", head)]
        )
        found = [_kernels(name, seen, 1, branch) for name, branch in branches] + [
            _kernels("R2", seen, 2, head)
        ]
        mixes = [each for each in found if each is not None]
        routing = None if config.activation == "softmax" else _routing(seen, head)
        activation, active = seen.trace.activation[0, head], seen.active[0, head]
        heads.append(Head(activation * asked, active & asked, sizes[head] * asked, mixes, routing))
    gates = {name: values[:, first:].float() for name, values in seen.gates.items()}
    gates = {name: torch.histc(values, BINS, 0, 1) / values.numel() for name, values in gates.items()}
    return Layer(index, config.activation, config.layout, heads, gates)


def _kernels(name: str, seen: Capture, which: int, index: int) -> Kernels | None:
    mix = (seen.heads.mix1, seen.heads.mix2)[which - 1]
    if mix is None:
        return None
    slots = seen.inputs.shape[1]
    diag, left, right = (parameter[index, :slots].detach() for parameter in (mix.diag, mix.left, mix.right))
    return Kernels(name, diag, left, right, mix.gate[0, :, index])


def _routing(seen: Capture, head: int) -> Routing:
    """At a step with few slots, on the plane along which its context varies most."""
    layer, config, dtype = seen.layer, seen.config, seen.heads.q.dtype
    step = min(config.num_registers + ROUTED, seen.inputs.shape[1]) - 1
    rows = seen.inputs[0, : step + 1].to(dtype)
    x = rows[-1]
    directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:2]
    reach = REACH * (rows - x).norm(dim=-1).max()
    plane = torch.stack([x, *(directions * reach)])  # [3, D]
    part = slice(head * config.qk_dim, (head + 1) * config.qk_dim)
    query = plane @ layer.q_proj.weight[part].T.to(dtype)
    if config.rope:
        query = rotate(query[None, :, None], torch.full((1, 3), step, device=x.device), config.rope_theta)[
            0, :, 0
        ]
    query_gate = mix_gate = None
    if layer.gates is not None:
        linear = plane @ layer.gates.weight.T.to(dtype)
        linear[0] += layer.gates.bias
        queries, _, mix, _ = linear.split(layer.gate_sizes, dim=-1)
        query_gate = queries[:, part] if config.feature_gates else None
        mix_gate = mix[:, head * config.rank : (head + 1) * config.rank] if config.mix1 else None
    kernels = _kernels("R1", seen, 1, head)
    keys = seen._slots(seen.heads.k[0, :, head], step, 0)
    return Routing(query, query_gate, keys, mix_gate, kernels, plane, step)


def pre_activations(routing: Routing, where: Tensor, dynamic: float = 1.0) -> Tensor:
    """``[n, 2] -> [n, S]`` at points of the plane; the gates follow the input by ``dynamic``: 0 holds them as they are at x."""
    ones = torch.ones(len(where), 1, dtype=where.dtype, device=where.device)
    at = torch.cat([ones, where], dim=1)  # [n, 3]
    gated = torch.cat([ones, dynamic * where], dim=1)
    query = at @ routing.query
    if routing.query_gate is not None:
        query = query * torch.sigmoid(gated @ routing.query_gate)
    scores = query @ routing.keys.T
    if routing.kernels is None or routing.mix_gate is None:
        return scores
    slots = scores.shape[1]
    diag, left, right = (
        each[:slots] for each in (routing.kernels.diag, routing.kernels.left, routing.kernels.right)
    )
    return scores * (1 + diag) + (scores @ left * torch.sigmoid(gated @ routing.mix_gate)) @ right.T
