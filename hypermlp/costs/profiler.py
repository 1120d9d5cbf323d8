"""FLOPs as PyTorch's profiler counts them, which is how the paper's efficiency table counts.

The profiler counts matrix products (two per multiply-add), and additions and multiplications that make a
new tensor (one per element). Everything else counts nothing: fused attention, Triton kernels,
one-dimensional convolutions, softmax, norms, activations, in-place operations. The paper counts a GPT-2 body
without embeddings and head; docs/performance.md explains what that hides.

Three of the paper's rows are written out below, term by term, as a plain PyTorch form would compute them.
Every other mixer is counted by the profiler itself, on this project's own PyTorch form. All counts are per
token.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hypermlp.config import MixerConfig
from hypermlp.layers.baselines.softmax import SoftmaxConfig, SoftmaxNaiveConfig
from hypermlp.layers.registry import Config, layer_of
from hypermlp.ops.dispatch import use_backend

ROW_BLOCK = 64  # rows per block of scores in the paper's HyperGLU: the size that reproduces its count


class Count(NamedTuple):
    """FLOPs per token."""

    forward: float
    train: float
    """Forward and backward pass together."""


def body_count(mixer: Count, hidden_size: int, layers: int) -> Count:
    """Return the FLOPs of a stack of mixers and GPT-2 MLPs.

    Each layer adds to the residual stream twice, in the forward and in the backward pass; positions are added
    once.
    """
    mlp, residuals = 2 * 8 * hidden_size**2, 2 * hidden_size
    forward = layers * (mixer.forward + mlp + residuals) + hidden_size
    return Count(forward, forward + layers * (mixer.train - mixer.forward + 2 * mlp + residuals))


def mixer_count(config: Config, length: int) -> Count:
    """Return the FLOPs of one layer for one sequence of ``length`` positions."""
    if isinstance(config, SoftmaxNaiveConfig):
        return _naive(config, length)
    if isinstance(config, SoftmaxConfig):
        return Count(8 * config.hidden_size**2, 3 * 8 * config.hidden_size**2)  # the projections alone
    if isinstance(config, MixerConfig) and config.activation != "softmax":
        return _row_blocks(config, length)
    return profiled(config, length)


def _naive(config: SoftmaxConfig, length: int) -> Count:
    """Return the FLOPs of softmax attention that forms the whole square of scores."""
    hidden, scores = config.hidden_size, config.num_heads * length
    products = 2 * 4 * hidden**2 + 2 * 2 * length * hidden
    scaling, rotation = scores, 6 * hidden
    # Fitted to the paper's figure. A plain form has scores + 4 * hidden here, which is 0.02 % less in total.
    backward = 2 * scores + 2 * hidden
    return Count(products + scaling + rotation, 3 * products + scaling + rotation + backward)


def _row_blocks(config: MixerConfig, length: int) -> Count:
    """Return the FLOPs of HyperMLP or HyperGLU in row blocks that end at the diagonal of the scores.

    The diagonals of the mixes are not counted.
    """
    hidden, qk, vo, rank = config.hidden_size, config.qk_width, config.vo_width, config.rank
    # score matrices that a mix is applied to
    mixes = (config.num_branches if config.mix1 else 0) + (config.num_heads if config.mix2 else 0)
    gated = (qk + vo if config.feature_gates else 0) + rank * mixes
    blocks = ((first, min(first + ROW_BLOCK, length)) for first in range(0, length, ROW_BLOCK))
    columns = sum(end * (end - first) for first, end in blocks) / length  # mean over the rows
    glu = config.num_heads * columns if config.activation == "glu" else 0
    projections = 2 * hidden * (2 * (qk + vo) + gated)
    products = projections + 2 * columns * (qk + vo + 2 * rank * mixes)
    # gates; the mixes' sums and masks; scale times gate; rows of the output times 1 / rho
    forward = gated + 2 * mixes * columns + glu + vo
    # A product has two gradients, a sum and a mask one; the norm's square counts twice, and its sum once.
    backward = 2 * gated + 2 * mixes * columns + 2 * glu + 2 * vo + 3 * config.num_heads * columns
    return Count(products + forward, 3 * products + forward + backward)


def profiled(config: Config, length: int) -> Count:
    """Return what the profiler counts for the layer of ``config``."""
    layer = layer_of(config)
    x = torch.zeros(1, length, config.hidden_size, requires_grad=True)
    works = (
        torch.no_grad()(lambda: layer(x)),
        lambda: torch.autograd.backward(layer(x), torch.ones_like(x)),
    )
    return Count(*(flops_seen(work) / length for work in works))


def flops_seen(work: Callable[[], object]) -> float:
    """Return what the profiler counts while ``work`` runs on the PyTorch form of the operator."""
    with use_backend("blocked"), quiet_profile(with_flops=True) as profiler:
        work()
    return float(sum(event.flops for event in profiler.key_averages()))


@contextlib.contextmanager
def quiet_profile(**settings: Any) -> Iterator[Any]:
    """Run PyTorch's profiler on the CPU, without its messages.

    It writes them from C++, past ``sys.stderr``, so the file descriptor itself is redirected meanwhile.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            # acc_events changes nothing in one cycle; PyTorch 2.10 warns without it.
            with profile(activities=[ProfilerActivity.CPU], acc_events=True, **settings) as profiler:
                yield profiler
        finally:
            os.dup2(kept, 2)
            os.close(kept)
