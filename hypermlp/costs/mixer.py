"""What a mixer layer costs: parameters, causal FLOPs, bytes of decoding state.

``config`` is a ``hypermlp.MixerConfig``, or the configuration of a baseline; both are ``layer.config``. The
costs of a baseline are read off its layer, which is built without memory (on PyTorch's meta device).

FLOPs are two per multiply-add of every matrix product (projections, convolution, scores, low-rank mixes,
readout), counted only for pairs of a query and a key that it sees. Element-wise work (gates, diagonals,
activation, norm) is not counted. For one sequence whose T positions are all computed, without registers or a
sliding window, P = T (T + 1) / 2 pairs, widths D, qk and vo, K taps, rank r, H heads and G branches::

    projections     4 T D (qk + vo)          scores     2 P qk
    conv            4 T D K                  mix1       4 P r G
    feature_gates   2 T D (qk + vo)          mix2       4 P r H
    mix_gates       2 T D r (G + H)          readout    2 P vo

Example::

    from hypermlp import HyperGLU
    from hypermlp.costs.mixer import forward_flops, parameter_count, state_bytes

    config = HyperGLU(768, max_length=1024).config
    parameters = parameter_count(config)
    prompt = forward_flops(config, 1024)  # a whole sequence of 1024 positions
    step = forward_flops(config, 1, 1024)  # the last of 1024 positions, with a cache
    cache = state_bytes(config, 1024)  # 4 bytes per number: float32
"""

import torch
from torch import nn

from hypermlp.errors import UserError
from hypermlp.layers.baselines.base import BaselineConfig
from hypermlp.layers.baselines.parts import causal_pairs
from hypermlp.layers.canon import TAPS
from hypermlp.layers.parameters import meta_layer, parameter_count, parameter_table
from hypermlp.layers.registry import Config

__all__ = ["core_flops", "flops_table", "forward_flops", "parameter_count", "parameter_table", "state_bytes"]

CORE_PARTS = ("scores", "mix1", "mix2", "readout", "core")
"""Parts of ``flops_table`` that the operator computes; the others belong to the layer around it."""


def flops_table(config: Config, queries: int, keys: int | None = None) -> dict[str, int]:
    """Return the forward FLOPs by part to compute the last ``queries`` of ``keys`` positions of one sequence.

    The parts of a label are "projections", "conv", "canon", "feature_gates", "mix_gates", "scores", "mix1",
    "mix2" and "readout"; those of a baseline "projections", "conv" and "core" (everything else).

    Args:
        config: the configuration of the layer.
        queries: the number of positions to compute; 1 is a decoding step.
        keys: the length of the sequence, these positions included. None: ``queries``, the whole sequence.

    Raises:
        UserError: unless 0 < queries <= keys.

    Example::

        from hypermlp import MixerConfig
        from hypermlp.costs.mixer import flops_table

        config = MixerConfig(hidden_size=768, max_length=1024)
        prompt, step = flops_table(config, 1024), flops_table(config, 1, 1024)
    """
    keys = queries if keys is None else keys
    if not 0 < queries <= keys:
        raise UserError(f"{queries} queries for {keys} keys; allowed: 0 < queries <= keys")
    if isinstance(config, BaselineConfig):
        layer = meta_layer(config)
        matrices = sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))
        conv = sum(parameter.numel() for name, parameter in layer.named_parameters() if name == "conv")
        return {
            "projections": 2 * queries * matrices,
            "conv": 2 * queries * conv,
            "core": layer.core_flops(queries, keys),
        }
    pairs = causal_pairs(queries, keys, config.sliding_window) + queries * config.num_registers
    rows = queries + config.num_registers  # keys and values are also computed from the registers
    hidden, qk, vo = config.hidden_size, config.qk_width, config.vo_width
    mixed1 = config.num_branches if config.mix1 else 0  # score matrices that a mix acts on
    mixed2 = config.num_heads if config.mix2 else 0
    return {
        "projections": 2 * (queries + rows) * hidden * (qk + vo),
        "conv": 2 * rows * 2 * hidden * config.conv_kernel if config.conv else 0,
        "canon": 2 * queries * (2 * qk + vo) * TAPS if config.canon else 0,
        "feature_gates": 2 * queries * hidden * (qk + vo) if config.feature_gates else 0,
        "mix_gates": 2 * queries * hidden * config.rank * (mixed1 + mixed2),
        "scores": 2 * pairs * qk,
        "mix1": 2 * pairs * 2 * config.rank * mixed1,
        "mix2": 2 * pairs * 2 * config.rank * mixed2,
        "readout": 2 * pairs * vo,
    }


def forward_flops(config: Config, queries: int, keys: int | None = None) -> int:
    """Return the forward FLOPs of the layer: the sum of ``flops_table``, with its arguments."""
    return sum(flops_table(config, queries, keys).values())


def core_flops(config: Config, queries: int, keys: int | None = None) -> int:
    """Return the forward FLOPs of the operator alone: the parts "scores", "mix1", "mix2" and "readout" of
    ``flops_table`` (for a baseline, "core"), with its arguments.
    """
    return sum(count for part, count in flops_table(config, queries, keys).items() if part in CORE_PARTS)


def state_bytes(
    config: Config, length: int, *, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes that decoding must keep after ``length`` positions.

    For a label these are keys, values, and the inputs that the next convolution sees; for a baseline, what
    its layer keeps. A ``MixerState`` may hold more than twice as much: its buffers double when they are full,
    and it keeps inputs that ``crop`` may need.

    Args:
        config: the configuration of the layer.
        length: the number of positions, 0 or more.
        batch_size: number of sequences (1).
        dtype: dtype of the layer and its input (torch.float32).

    Raises:
        UserError: for a negative length, or no sequences.

    Example::

        import torch
        from hypermlp import MixerConfig
        from hypermlp.costs.mixer import state_bytes

        config = MixerConfig(hidden_size=768, max_length=1024)
        print(state_bytes(config, 1024, dtype=torch.bfloat16))
    """
    if length < 0 or batch_size < 1:
        raise UserError(f"length is {length}, batch_size {batch_size}; they must be at least 0 and 1")
    if isinstance(config, BaselineConfig):  # linear up to the window, so two lengths determine it
        once, twice = (_bytes_held(config, count, dtype) for count in (1, 2))
        length = min(length, getattr(config, "sliding_window", None) or length)
        return batch_size * (once + (length - 1) * (twice - once)) if length > 0 else 0
    seen = length if config.sliding_window is None else min(length, config.sliding_window)
    conv_inputs = min(length, config.conv_kernel - 1) * config.hidden_size if config.conv else 0
    if config.canon:
        conv_inputs += min(length, TAPS - 1) * (2 * config.qk_width + config.vo_width)
    return batch_size * dtype.itemsize * (seen * (config.qk_width + config.vo_width) + conv_inputs)


@torch.no_grad()
def _bytes_held(config: BaselineConfig, length: int, dtype: torch.dtype) -> int:
    layer = meta_layer(config).to(dtype)
    state = layer.new_state(1)
    layer(torch.empty(1, length, config.hidden_size, device="meta", dtype=dtype), state=state)
    return sum(x.numel() * x.itemsize for x in state.tensors())
