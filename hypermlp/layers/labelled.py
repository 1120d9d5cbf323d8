"""HyperMLP and HyperGLU: the mixers of two labels, with signatures of their own."""

from typing import ClassVar

from hypermlp.config import MixerConfig
from hypermlp.layers.mixer import Mixer


class LabelledMixer(Mixer):
    """A mixer whose label is fixed by the class."""

    label: ClassVar[str]

    def __init__(
        self,
        hidden_size: int,
        max_length: int,
        *,
        num_heads: int = MixerConfig.num_heads,
        compression: int = 4,
        rank: int = MixerConfig.rank,
        conv_kernel: int = MixerConfig.conv_kernel,
        num_registers: int = MixerConfig.num_registers,
        eps: float = MixerConfig.eps,
        init_std: float = MixerConfig.init_std,
    ):
        config = MixerConfig.from_label(
            self.label,
            hidden_size=hidden_size,
            max_length=max_length,
            num_heads=num_heads,
            compression=compression,
            rank=rank,
            conv_kernel=conv_kernel,
            num_registers=num_registers,
            eps=eps,
            init_std=init_std,
        )
        super().__init__(config)

    # Python's message for a missing or wrong argument begins with this name.
    __init__.__qualname__ = "HyperMLP or HyperGLU"


class HyperMLP(LabelledMixer):
    """HyperMLP, label ``R-cg-q-12o``: ReLU of normalised scores that are mixed along the sequence.

    A causal layer ``[B, T, D] -> [B, T, D]`` in the place of attention. For each head at position t::

        h = (q Kᵀ) R1(x_t)       a = relu(h / sqrt(‖h‖² + eps))       o = a R2(x_t)ᵀ V

    R1 and R2 are learned matrices over the visible positions that depend on the input x_t; ``Mixer`` has the
    whole formula, ``forward`` explains decoding, padding and windows. ``HyperGLU`` has the lower loss in the
    paper's design study; HyperMLP is simpler: one score branch and one R1 per head instead of two.

    Args:
        hidden_size: width D of the input and the output, a multiple of compression and of num_heads.
        max_length: the most positions that one position can see. Longer input raises unless the argument
            ``starts`` of ``forward`` limits every position to a window. ``Mixer.from_label`` builds layers
            with a fixed window (``sliding_window``).
        num_heads: number of heads (2).
        compression: divides the width of queries and keys (4): over all heads they have ``hidden_size /
            compression`` channels, which must be a multiple of num_heads. Values keep ``hidden_size``.
        rank: rank of the low-rank part of R1 and R2 (16).
        conv_kernel: taps of the causal convolution before the key and value projections (4).
        num_registers: learned input vectors of width D that every position can also see (0). The output is
            still ``[B, T, D]``.
        eps: added to the squared norm of the scores (1e-12).
        init_std: standard deviation of the normally distributed initial weights (0.02); biases and diagonals
            start at zero.

    Raises:
        UserError: for a value that is not allowed, such as a width that cannot be divided as stated.

    Example::

        import torch
        from hypermlp import HyperMLP

        layer = HyperMLP(768, max_length=1024)
        y = layer(torch.randn(2, 128, 768))  # [2, 128, 768]
    """

    label = "R-cg-q-12o"


class HyperGLU(LabelledMixer):
    """HyperGLU, label ``G-cg-q-12o``: one score branch selects slots, a second one sets their strength.

    A causal layer ``[B, T, D] -> [B, T, D]`` in the place of attention. For each head at position t::

        h = (q Kᵀ) R1(x_t)       a = softplus(h_scale) * relu(h_gate / sqrt(‖h_gate‖² + eps))
        o = a R2(x_t)ᵀ V

    h_gate and h_scale are the h of the head's two branches. Each has its own q, K and R1, with half the
    channels that the one branch of ``HyperMLP`` has. R1 and R2 are learned matrices over the visible
    positions that depend on the input x_t; ``Mixer`` has the whole formula, ``forward`` explains decoding,
    padding and windows.

    Args:
        hidden_size: width D of the input and the output, a multiple of compression and of num_heads.
        max_length: the most positions that one position can see. Longer input raises unless the argument
            ``starts`` of ``forward`` limits every position to a window. ``Mixer.from_label`` builds layers
            with a fixed window (``sliding_window``).
        num_heads: number of heads (2).
        compression: divides the width of queries and keys (4): over all heads they have ``hidden_size /
            compression`` channels, which must be a multiple of 2 num_heads. Values keep ``hidden_size``.
        rank: rank of the low-rank part of R1 and R2 (16).
        conv_kernel: taps of the causal convolution before the key and value projections (4).
        num_registers: learned input vectors of width D that every position can also see (0). The output is
            still ``[B, T, D]``.
        eps: added to the squared norm of the scores (1e-12).
        init_std: standard deviation of the normally distributed initial weights (0.02); biases and diagonals
            start at zero.

    Raises:
        UserError: for a value that is not allowed, such as a width that cannot be divided as stated.

    Example::

        import torch
        from hypermlp import HyperGLU

        layer = HyperGLU(768, max_length=1024)
        y = layer(torch.randn(2, 128, 768))  # [2, 128, 768]
    """

    label = "G-cg-q-12o"
