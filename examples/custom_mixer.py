"""Write a mixer of your own and run it on the MAD benchmark beside HyperGLU.

    python examples/custom_mixer.py                           # about two minutes on 2 cores
    cd examples && hypermlp mad run --mixer custom_mixer:DecayedMemory   # all tasks, with records

A mixer is any causal module ``[batch, positions, width] -> [batch, positions, width]``. The benchmark checks
that no position sees a later one before it trains anything. To make it a baseline with decoding, padding and
packing, see "a baseline" in CONTRIBUTING.md.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp import mad


class DecayedMemory(nn.Module):
    """A memory that each channel forgets at its own rate: ``m[t] = a m[t-1] + k[t]``, read by a gate."""

    def __init__(self, hidden_size: int, max_length: int):
        super().__init__()
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decay = nn.Parameter(torch.linspace(0, 6, hidden_size))  # sigmoid: from 0.5 to 0.998
        self.max_length = max_length

    def forward(self, x: Tensor) -> Tensor:
        lags = torch.arange(x.shape[1], device=x.device)
        kernel = torch.exp(lags * F.logsigmoid(self.decay)[:, None])  # [channels, lags]
        key = F.pad(self.key(x).mT, (x.shape[1] - 1, 0))
        memory = F.conv1d(key, kernel.flip(-1)[:, None], groups=x.shape[-1]).mT
        return self.out(memory * torch.sigmoid(self.gate(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--grid", default="mini", choices=["mini", "smoke"], help="mini (default), or smoke: two steps"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["in-context-recall"],
        choices=list(mad.TASKS),
        help="tasks of the benchmark (default: in-context-recall)",
    )
    args = parser.parse_args()
    # The benchmark calls the class, or any function of hidden_size and max_length, for every layer.
    for mixer in (DecayedMemory, "G-cg-q-12o"):
        print(mad.benchmark(mixer, grid=args.grid, tasks=args.tasks), end="\n\n", flush=True)
    print("G-cg-q-12o is HyperGLU. Accuracy in percent; in brackets, the published value.")


if __name__ == "__main__":
    main()
