"""What a mixer layer costs: parameters, true causal FLOPs, bytes of decoding state.

A label's are written out here from its configuration; a peer's come from the layer itself, built without memory.

FLOPs are two per multiply-add of every contraction (projections, convolution, scores, low-rank mixes, readout), and only
for pairs of a query and a key that it sees. Element-wise work (gates, diagonals, activation, norm) is not counted.
"""

from collections import Counter

import torch
from torch import nn

from hypermlp.errors import UserError
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.baselines.base import BaselineConfig
from hypermlp.layers.baselines.parts import causal_pairs
from hypermlp.layers.registry import Config, layer_of


def _peer(config: BaselineConfig) -> SequenceMixer:
    with torch.device("meta"):
        layer = layer_of(config)
    return layer


@torch.no_grad()
def _bytes_held(config: BaselineConfig, length: int, dtype: torch.dtype) -> int:
    layer = _peer(config).to(dtype)
    state = layer.new_state(1)
    layer(torch.empty(1, length, config.hidden_size, device="meta", dtype=dtype), state=state)
    return sum(x.numel() * x.itemsize for x in state.tensors())


def parameter_table(config: Config) -> dict[str, int]:
    """Parameters by part; their sum is the layer's."""
    if isinstance(config, BaselineConfig):
        parts: Counter[str] = Counter()
        for name, parameter in _peer(config).named_parameters():
            parts[name.split(".")[0]] += parameter.numel()
        return dict(parts)
    hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
    per_slot = 2 * config.rank + 1  # left, right, diag

    def mix(heads: int) -> int:
        return heads * config.num_slots * per_slot + (hidden + 1) * heads * config.rank

    return {
        "projections": 2 * hidden * (qk + vo),
        "conv": 2 * hidden * config.conv_kernel * config.conv,
        "feature_gates": (hidden + 1) * (qk + vo) * config.feature_gates,
        "mix1": mix(config.num_branches) * config.mix1,
        "mix2": mix(config.num_heads) * config.mix2,
        "registers": hidden * config.num_registers,
    }


def parameter_count(config: Config) -> int:
    return sum(parameter_table(config).values())


def flops_table(config: Config, queries: int, keys: int | None = None) -> dict[str, int]:
    """Forward FLOPs by part, for the last ``queries`` of ``keys`` positions of one sequence (all of them by default)."""
    keys = queries if keys is None else keys
    if not 0 < queries <= keys:
        raise UserError(f"{queries} queries for {keys} keys; allowed: 0 < queries <= keys")
    if isinstance(config, BaselineConfig):
        layer = _peer(config)
        matrices = sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))
        conv = sum(parameter.numel() for name, parameter in layer.named_parameters() if name == "conv")
        return {
            "projections": 2 * queries * matrices,
            "conv": 2 * queries * conv,
            "core": layer.core_flops(queries, keys),
        }
    pairs = causal_pairs(queries, keys) + queries * config.num_registers
    rows = queries + config.num_registers  # that keys and values are made from
    hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
    return {
        "projections": 2 * (queries + rows) * hidden * (qk + vo),
        "conv": 2 * rows * 2 * hidden * config.conv_kernel * config.conv,
        "feature_gates": 2 * queries * hidden * (qk + vo) * config.feature_gates,
        "mix_gates": 2
        * queries
        * hidden
        * config.rank
        * (config.num_branches * config.mix1 + config.num_heads * config.mix2),
        "scores": 2 * pairs * qk,
        "mix1": 2 * pairs * 2 * config.rank * config.num_branches * config.mix1,
        "mix2": 2 * pairs * 2 * config.rank * config.num_heads * config.mix2,
        "readout": 2 * pairs * vo,
    }


CORE_PARTS = (
    "scores",
    "mix1",
    "mix2",
    "readout",
    "core",
)  # what the operator does; the rest is the layer around it


def forward_flops(config: Config, queries: int, keys: int | None = None) -> int:
    return sum(flops_table(config, queries, keys).values())


def core_flops(config: Config, queries: int, keys: int | None = None) -> int:
    table = flops_table(config, queries, keys)
    return sum(table.get(part, 0) for part in CORE_PARTS)


def state_bytes(
    config: Config, length: int, *, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes that decoding must keep after ``length`` positions: keys, values, and the inputs that the next convolution sees.

    A ``MixerState`` may hold twice as much and more: spare capacity, and inputs for a rollback.
    """
    if length < 0 or batch_size < 1:
        raise UserError(f"length is {length}, batch_size {batch_size}; they must be at least 0 and 1")
    if isinstance(config, BaselineConfig):
        once, twice = (_bytes_held(config, count, dtype) for count in (1, 2))
        return batch_size * (once + (length - 1) * (twice - once)) if length > 0 else 0
    conv_inputs = min(length, config.conv_kernel - 1) * config.hidden_size * config.conv
    return batch_size * dtype.itemsize * (length * (config.qk_width + config.vo_width) + conv_inputs)
