"""FLOPs as the paper's efficiency table has them: what PyTorch's profiler counts.

The profiler knows matrix products (two per multiply-add) and additions and multiplications that make a new tensor (one per element).
All else costs nothing: fused attention, kernels in Triton, one-dimensional convolutions, softmax, norms, activations, in-place work.
The paper counts a GPT-2 body without embeddings and head; docs/performance.md says what that hides.

Three of the paper's rows are written out below, term by term, as a plain PyTorch form would do them; every other mixer is counted
by the profiler itself, on this project's own PyTorch form. All counts here are per token.
"""

from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hypermlp.bench.measure import Work, quiet_stderr
from hypermlp.config import MixerConfig
from hypermlp.layers.baselines.softmax import SoftmaxConfig, SoftmaxNaiveConfig
from hypermlp.layers.registry import Config, layer_of
from hypermlp.ops.dispatch import use_backend

ROW_BLOCK = 64  # of scores in the paper's HyperGLU: the one that gives its count


class Count(NamedTuple):
    forward: float
    train: float
    """Forward and backward."""


def body_count(mixer: Count, hidden_size: int, layers: int) -> Count:
    """A stack of mixers and GPT-2's MLPs: a residual is added twice in a layer, and so are its gradients; positions are added once."""
    mlp, residuals = 2 * 8 * hidden_size**2, 2 * hidden_size
    forward = layers * (mixer.forward + mlp + residuals) + hidden_size
    return Count(forward, forward + layers * (mixer.train - mixer.forward + 2 * mlp + residuals))


def mixer_count(config: Config, length: int) -> Count:
    """One layer of one sequence of this length."""
    if isinstance(config, SoftmaxNaiveConfig):
        return _naive(config, length)
    if isinstance(config, SoftmaxConfig):
        return _flash(config)
    if isinstance(config, MixerConfig) and config.activation != "softmax":
        return _row_blocks(config, length)
    return profiled(config, length)


def _flash(config: SoftmaxConfig) -> Count:
    projections = 2 * 4 * config.hidden_size**2
    return Count(projections, 3 * projections)


def _naive(config: SoftmaxConfig, length: int) -> Count:
    hidden, scores = config.hidden_size, config.num_heads * length
    products = 2 * 4 * hidden**2 + 2 * 2 * length * hidden
    scaling, rotation = scores, 6 * hidden
    # Fitted to the paper's figure. The plain form that the profiler saw has scores + 4 * hidden, which is 0.02 % less in all.
    backward = 2 * scores + 2 * hidden
    return Count(products + scaling + rotation, 3 * products + scaling + rotation + backward)


def _row_blocks(config: MixerConfig, length: int) -> Count:
    """HyperMLP and HyperGLU by blocks of rows that stop at the block's last position, without the diagonals of the mixes."""
    hidden, qk, vo, rank = config.hidden_size, config.qk_width, config.vo_width, config.rank
    mixed = (
        config.num_branches * config.mix1 + config.num_heads * config.mix2
    )  # matrices of scores that a mix works on
    blocks = ((first, min(first + ROW_BLOCK, length)) for first in range(0, length, ROW_BLOCK))
    columns = sum(end * (end - first) for first, end in blocks) / length  # mean over the rows
    glu = config.num_heads * columns * (config.activation == "glu")
    gated = (qk + vo) * config.feature_gates + rank * mixed
    projections = 2 * hidden * (2 * (qk + vo) + (qk + vo) * config.feature_gates + rank * mixed)
    products = projections + 2 * columns * (qk + vo + 2 * rank * mixed)
    # gates; the mixes' sums; their masks; scale times gate; rows of the output times 1 / rho
    forward = gated + mixed * columns + mixed * columns + glu + vo
    # a product has two gradients, a sum and a mask one; the norm's square, twice, and its sum with the other gradient
    backward = (
        2 * gated + mixed * columns + mixed * columns + 2 * glu + 2 * vo + 3 * config.num_heads * columns
    )
    return Count(products + forward, 3 * products + forward + backward)


def profiled(config: Config, length: int) -> Count:
    """Counted, not written out."""
    layer = layer_of(config)
    x = torch.zeros(1, length, config.hidden_size, requires_grad=True)

    def train() -> None:
        y = layer(x)
        y.backward(torch.ones_like(y))

    with torch.no_grad():
        forward = flops_seen(lambda: layer(x))
    return Count(forward / length, flops_seen(train) / length)


def flops_seen(work: Work) -> float:
    """What the profiler counts of it, in our PyTorch form of the operator."""
    with (
        quiet_stderr(),
        use_backend("blocked"),
        profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler,
    ):
        work()
    return float(sum(event.flops for event in profiler.key_averages()))
