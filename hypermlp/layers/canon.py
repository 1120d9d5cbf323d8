"""Canon layers: short depthwise causal convolutions with a residual, at four places of a block.

Paper: Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers"
(2025). Written from its formulas: ``y[t] = x[t] + sum over lags i < K of weight[:, i] * x[t - i]``, over the
positions that t sees, with K = 4 taps, no bias and no activation.

Shapes: B batch, T new positions, W width, K taps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility
from hypermlp.ops.api import causal_conv

TAPS = 4
PLACES = {
    "A": "the input of the mixer, after its norm",
    "B": "the queries, keys and values, before rotation and gates",
    "C": "the input of the MLP, after its norm",
    "D": "the hidden units of the MLP, before the activation",
}


class Canon(nn.Module):
    """One Canon layer, ``[B, T, W] -> [B, T, W]``.

    Example::

        y = Canon(64)(torch.randn(2, 9, 64), visibility)
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, TAPS))
        self.initialize_parameters(nn.init, 0.0)

    @torch.no_grad()
    def initialize_parameters(self, init: Any, std: float) -> None:
        """Draw the weights as PyTorch does for a convolution of one channel; ``std`` has no effect."""
        init.uniform_(self.weight, -(TAPS**-0.5), TAPS**-0.5)

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        state: DecodingState | None = None,
        name: str = "canon",
        *,
        backend: str = "auto",
    ) -> Tensor:
        """Add the convolution of ``x`` to it. ``state`` keeps the latest inputs under ``name``.

        A ``backend`` without convolutions leaves them to "auto".
        """
        rows = x if state is None else state.extended(name, x, needed=TAPS - 1)
        length, reach = x.shape[1], visibility.reach
        (convolved,) = causal_conv(rows, (self.weight,), length, reach, backend=backend, required=False)
        return x + convolved
