"""Mamba: a selective state space model, in which each channel keeps a few numbers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, run_recurrence
from hypermlp.layers.baselines.parts import at_least_float32, initial_step_bias, initial_uniform, short_conv
from hypermlp.layers.baselines.scan import selective_scan
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class MambaConfig(BaselineConfig):
    """Settings of ``mamba``."""

    name = "mamba"

    expand: int = 2
    """Width of the recurrence, over the hidden size."""
    state_size: int = 16
    """Numbers that each channel keeps."""
    step_rank: int = 0
    """Rank of the matrix that makes the step sizes; 0 for hidden_size / 16, rounded up."""
    conv_kernel: int = 4
    """Taps of the convolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("step_rank", math.ceil(self.hidden_size / 16))

    @property
    def width(self) -> int:
        return self.expand * self.hidden_size


class Mamba(Baseline[MambaConfig]):
    """A selective state space model.

    For each channel, with u = silu(conv(x W_u) + conv_bias) and state_size numbers in h::

        h[t] = exp(-step[t] * rate) * h[t-1] + step[t] u[t] write[t]
        o[t] = h[t] · read[t] + skip * u[t]
        y[t] = (o[t] * silu(x[t] W_g)) W_o

    where step[t] = softplus(u[t] W_1 W_2 + step_bias), write[t] = u[t] W_w and read[t] = u[t] W_r.

    Paper: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).

    Settings: ``expand`` (2), ``state_size`` (16), ``step_rank`` (default: hidden_size / 16), ``conv_kernel``
    (4).
    """

    undecayed = ("log_rate", "step_weight")

    def build(self, config: MambaConfig) -> None:
        width = config.width
        self.in_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)  # u, gate
        self.conv = nn.Parameter(torch.empty(width, config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.sizes = [config.step_rank, config.state_size, config.state_size]  # step, write, read
        self.select_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.step_weight = nn.Parameter(torch.empty(width, config.step_rank))
        self.step_bias = nn.Parameter(torch.empty(width))
        self.log_rate = nn.Parameter(torch.empty(width, config.state_size))
        self.skip = nn.Parameter(torch.empty(width))
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        config, width = self.config, self.config.width
        return {
            "conv": initial_uniform(self.conv.shape, config.conv_kernel),
            "conv_bias": initial_uniform([width], config.conv_kernel),
            "step_weight": initial_uniform(self.step_weight.shape, config.step_rank),
            "step_bias": initial_step_bias(width),
            "log_rate": torch.arange(1.0, config.state_size + 1).log().expand(width, -1),
            "skip": torch.ones(width),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(short_conv(u, self.conv, state, visibility.reach) + self.conv_bias)
        u = visibility.hide_padding(u)  # the bias reaches padding too
        step, write, read = self.select_proj(u).split(self.sizes, dim=-1)
        step = F.softplus(at_least_float32(step @ self.step_weight.mT) + self.step_bias)
        decay = -at_least_float32(self.log_rate).exp()
        inputs = u, step, decay, write, read
        out = run_recurrence(selective_scan, *inputs, state=state, visibility=visibility)
        return self.o_proj((out.to(x.dtype) + self.skip * u) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        config = self.config
        return queries * 2 * config.width * (2 * config.state_size + config.step_rank)
