"""HGRN: a gated recurrence of single numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.layers.baselines.base import Baseline, BaselineConfig, run_recurrence
from hypermlp.layers.baselines.parts import at_least_float32
from hypermlp.layers.baselines.scan import scan
from hypermlp.layers.state import DecodingState
from hypermlp.layers.visibility import Visibility


class HgrnConfig(BaselineConfig):
    """Settings of ``hgrn``: it has none of its own."""

    name = "hgrn"


class Hgrn(Baseline[HgrnConfig]):
    """HGRN's recurrence, in real numbers.

    For each channel::

        h[t] = f[t] * h[t-1] + (1 - f[t]) * silu(x[t] W_i)         f[t] = sigmoid(x[t] W_f)
        y[t] = (RMSNorm(h[t]) * silu(x[t] W_g)) W_o

    The paper's numbers are complex, and its forget gates have a lower bound that is learned over all layers
    of a model together.

    Paper: Qin et al., "Hierarchically Gated Recurrent Neural Network for Sequence Modeling" (2023).
    """

    def build(self, config: HgrnConfig) -> None:
        hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=False)  # input, forget gate, output gate
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def mix(self, x: Tensor, state: DecodingState | None, visibility: Visibility) -> Tensor:
        new, forget, gate = self.in_proj(x).chunk(3, dim=-1)
        forget = torch.sigmoid(at_least_float32(forget))
        new = F.silu(at_least_float32(new)) * (1 - forget)
        out = run_recurrence(scan, forget, new, state=state, visibility=visibility)
        return self.o_proj(self.norm(out.to(x.dtype)) * F.silu(gate))

    def core_flops(self, queries: int, keys: int) -> int:
        return queries * 2 * self.config.hidden_size
