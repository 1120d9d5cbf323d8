"""Mamba: a selective state space, each channel with a few numbers that decay at input-dependent rates."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, remembered
from hypermlp.layers.baselines.parts import initial_conv, initial_step_bias, short_conv
from hypermlp.layers.baselines.scan import selective_scan
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class MambaConfig(BaselineConfig):
    name = "mamba"

    expand: int = 2
    """Width of the recurrence over the hidden size."""
    state_size: int = 16
    """Numbers that each channel keeps."""
    step_rank: int = 0
    """Of the matrices that make the step sizes; 0 stands for hidden_size / 16."""
    conv_kernel: int = 4
    """Taps of the convolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fill("step_rank", -(-self.hidden_size // 16))

    @property
    def width(self) -> int:
        return self.expand * self.hidden_size


class Mamba(Baseline):
    config: MambaConfig
    Config: ClassVar = MambaConfig
    undecayed = ("log_rate", "step_weight")

    def __init__(self, config: MambaConfig):
        super().__init__(config)
        width = config.width
        self.in_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)  # x, gate
        self.conv = nn.Parameter(torch.empty(width, config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.sizes = [config.step_rank, config.state_size, config.state_size]  # step, write, read
        self.select_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.step_weight = nn.Parameter(torch.empty(width, config.step_rank))
        self.step_bias = nn.Parameter(torch.empty(width))
        self.log_rate = nn.Parameter(torch.empty(width, config.state_size))
        self.skip = nn.Parameter(torch.empty(width))
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        width, taps = self.conv.shape
        bound = self.config.step_rank**-0.5
        return {
            "conv": initial_conv(width, taps),
            "conv_bias": torch.empty(width).uniform_(-(taps**-0.5), taps**-0.5),
            "step_weight": torch.empty(self.step_weight.shape).uniform_(-bound, bound),
            "step_bias": initial_step_bias(width),
            "log_rate": torch.arange(1.0, self.config.state_size + 1).log().expand(width, -1),
            "skip": torch.ones(width),
        }

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = F.silu(short_conv(inner, self.conv, state, "conv", visibility.reach) + self.conv_bias)
        if visibility.reach is not None:
            inner = inner.masked_fill((visibility.reach < 1)[:, :, None], 0)  # the bias of nothing
        step, write, read = self.select_proj(inner).split(self.sizes, dim=-1)
        step = F.softplus((step @ self.step_weight.mT).to(dtype) + self.step_bias)
        memory = remembered(state, "memory")
        memory = step.new_zeros(x.shape[0], *self.log_rate.shape) if memory is None else memory.to(dtype)
        decay = -self.log_rate.to(dtype).exp()
        begins = None if visibility.reach is None else visibility.reach < 2
        out, memory = selective_scan(
            inner.to(dtype), step, decay, write.to(dtype), read.to(dtype), memory, begins
        )
        if state is not None:
            state["memory"] = memory
        out = out.to(x.dtype) + self.skip * inner
        return self.o_proj(out * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        config = self.config
        return queries * 2 * config.width * (2 * config.state_size + config.step_rank)
