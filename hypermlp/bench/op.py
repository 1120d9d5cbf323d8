"""The operator and the layer against PyTorch's fused softmax attention at the same hidden size."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench.measure import (
    WARMUPS,
    Row,
    Work,
    interleaved_times,
    peak_bytes,
    quartiles,
    with_quartiles,
)
from hypermlp.costs.mixer import core_flops, forward_flops
from hypermlp.layers import Mixer
from hypermlp.ops import hyper_attention
from hypermlp.reporting.table import Columns, Table
from hypermlp.testing import op_inputs, randomise_

GEMM_SIZE = 1536
SOFTMAX_HEADS = (2, 12)  # the faster one counts; a count that does not divide the width is left out
RATIO = ("ratio", lambda row: with_quartiles(row["ratio"], row.get("ratio_quartiles")))
SIZE = (("B", "{batch}"), ("T", "{length}"), ("D", "{hidden}"), ("threads", "{threads}"))
COLUMNS: Columns = [
    ("what", "{what}"),
    ("backend", "{backend}"),
    *SIZE,
    ("ours ms", "{ours_ms:.2f}"),
    (
        "softmax ms (heads)",
        lambda row: ", ".join(f"{ms:.2f} ({heads})" for heads, ms in row["softmax_ms"].items()),
    ),
    RATIO,
    (
        "of GEMM peak",
        lambda row: "" if row["share_of_gemm_peak"] is None else f"{row['share_of_gemm_peak']:.0%}",
    ),
    ("ours MiB", "{ours_mib:.1f}"),
    ("softmax MiB", "{softmax_mib:.1f}"),
]
GOAL_COLUMNS: Columns = [
    ("goal", "{goal}"),
    RATIO,
    ("at most", "{at_most:.2f}"),
    ("aim", "{aim:.2f}"),
    ("reached", lambda row: "yes" if row["ratio"] <= row["at_most"] else "no"),
]
COMMIT_COLUMNS: Columns = [
    ("what", "{what}"),
    *SIZE,
    ("this tree, ms", "{ours_ms:.2f}"),
    ("commit, ms", "{theirs_ms:.2f}"),
    ("ratio", "{ratio:.3f}"),
    ("quartiles", "{ratio_quartiles[0]:.3f} to {ratio_quartiles[1]:.3f}"),
    ("95 % of the median", "{ratio_interval[0]:.3f} to {ratio_interval[1]:.3f}"),
    ("ratios", "{ratios}"),
]


def table(rows: list[Row]) -> Table:
    """Return the table of rows that ``OpBench`` measured."""
    return Table.of(rows, COLUMNS, left=frozenset({"backend"}))


def goal_table(rows: list[Row]) -> Table:
    """Return the table of the goals that ``hypermlp bench op --goals`` measured."""
    return Table.of(rows, GOAL_COLUMNS)


def commit_table(rows: list[Row]) -> Table:
    """Return the table of a comparison of two commits; a ratio below 1 means that this tree is faster."""
    return Table.of(rows, COMMIT_COLUMNS)


@dataclass(frozen=True)
class Case:
    """One size, and which parts of it to measure."""

    batch: int
    length: int
    hidden: int
    threads: int
    parts: tuple[str, ...] = ("core", "layer", "decode")


def sweep_cases(threads: int) -> list[Case]:
    """Return the sizes of ``--sweep``: lengths, widths, a small model, one thread, decoding."""
    training = ("core", "layer")
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192)
    return [
        *(Case(2 if length <= 2048 else 1, length, 768, threads, training) for length in lengths),
        *(Case(2, 1024, hidden, threads, training) for hidden in (128, 256, 1024)),
        Case(32, 128, 128, threads, training),
        Case(2, 1024, 768, 1, training),
        *(Case(b, length, 768, threads, ("decode",)) for length in (256, 1024, 4096) for b in (1, 8)),
    ]


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with one fused projection for q, k and v, and no biases: the baseline."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return the outputs of all positions, or of one token at the last position of a full ``cache``."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if cache is not None:
            cache[0][:, :, -1:], cache[1][:, :, -1:] = k, v
            k, v = cache
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.out(y.transpose(1, 2).flatten(2))

    def cache(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Return random keys and values, each ``[B, heads, length, width]``."""
        shape = (batch, self.num_heads, length, self.out.in_features // self.num_heads)
        return torch.randn(shape), torch.randn(shape)


class Computation(NamedTuple):
    """A differentiable computation."""

    run: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    """Tensors whose gradients the backward pass computes."""

    def forward(self) -> Work:
        """Return the computation without gradients."""
        return torch.no_grad()(self.run)

    def forward_backward(self) -> Work:
        """Return the computation and its backward pass from a random gradient of the output."""
        with torch.no_grad():
            grad = torch.randn_like(self.run())
        return lambda: torch.autograd.grad(self.run(), self.leaves, grad)


class OpBench:
    """The measurements of one case with one backend.

    ``label`` names our mixer. ``softmax_heads`` are head counts of the baseline, None for SOFTMAX_HEADS.
    ``rounds`` and ``seconds`` limit the timing of a row, as in ``interleaved_medians``.
    """

    def __init__(
        self,
        label: str,
        case: Case,
        backend: str,
        *,
        softmax_heads: Sequence[int] | None = None,
        rounds: int,
        seconds: float,
    ):
        self.label, self.case, self.backend = label, case, backend
        self.rounds, self.seconds = rounds, seconds
        self.softmax = {
            heads: SoftmaxAttention(case.hidden, heads)
            for heads in softmax_heads or [h for h in SOFTMAX_HEADS if case.hidden % h == 0] or [1]
        }
        self.x = torch.randn(case.batch, case.length, case.hidden)

    def rows(self) -> list[Row]:
        """Return a row for every measurement of the case."""
        parts = {"core": self._core, "layer": self._layer, "decode": self._decode}
        return [row for part in self.case.parts for row in parts[part]()]

    def _mixer(self, max_length: int) -> Mixer:
        mixer = Mixer.from_label(self.label, hidden_size=self.case.hidden, max_length=max_length)
        randomise_(mixer, scale=0.02)
        mixer.backend = self.backend
        return mixer

    def _core(self) -> list[Row]:
        case, config = self.case, self._mixer(self.case.length).config
        inputs = op_inputs(
            batch=case.batch,
            queries=case.length,
            heads=config.num_heads,
            qk_dim=config.qk_dim,
            vo_dim=config.vo_dim,
            rank=config.rank,
            activation=config.activation,
            mixes=("1" if config.mix1 else "") + ("2" if config.mix2 else ""),
            dtype=torch.float32,
        ).requires_grad()
        attend = partial(
            hyper_attention,
            *inputs,
            activation=config.activation,
            layout=config.layout,
            backend=self.backend,
        )

        def attention(heads: int) -> Computation:
            shape = (case.batch, heads, case.length, case.hidden // heads)
            q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
            return Computation(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True), [q, k, v])

        ours, softmax = Computation(attend, inputs.tensors()), {h: attention(h) for h in self.softmax}
        return self._two_rows("core", ours, softmax, case.batch * core_flops(config, case.length))

    def _layer(self) -> list[Row]:
        x, mixer = self.x.clone().requires_grad_(), self._mixer(self.case.length)

        def computation(module: nn.Module) -> Computation:
            return Computation(partial(module, x), [x, *module.parameters()])

        softmax = {heads: computation(module) for heads, module in self.softmax.items()}
        flops = self.case.batch * forward_flops(mixer.config, self.case.length)
        return self._two_rows("layer", computation(mixer), softmax, flops)

    def _two_rows(
        self, what: str, ours: Computation, softmax: Mapping[int, Computation], flops: int
    ) -> list[Row]:
        passes = (("forward", Computation.forward, 1), ("forward+backward", Computation.forward_backward, 3))
        return [
            self._row(f"{what} {name}", work(ours), {h: work(c) for h, c in softmax.items()}, factor * flops)
            for name, work, factor in passes
        ]

    @torch.no_grad()
    def _decode(self) -> list[Row]:
        """Return the row of one-token decoding. As in use, every call of ours decodes a new position."""
        batch, length = self.case.batch, self.case.length
        mixer = self._mixer(length + WARMUPS + self.rounds + 8)
        state, token = mixer.new_state(batch), self.x[:, -1:]
        mixer(self.x[:, :-1], state=state)
        softmax = {
            heads: torch.no_grad()(partial(module, token, module.cache(batch, length)))
            for heads, module in self.softmax.items()
        }
        ours = torch.no_grad()(partial(mixer, token, state=state))
        return [self._row("layer decode one token", ours, softmax, None)]

    def _row(self, what: str, ours: Work, softmax: Mapping[int, Work], flops: int | None) -> Row:
        """Return the row of one measurement. The ratio is the median over the rounds, to the faster head
        count.
        """
        a, b, out = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))  # for the machine's best rate
        works = {str(heads): work for heads, work in softmax.items()}
        works |= {"ours": ours, "gemm": lambda: torch.mm(a, b, out=out)}
        times = interleaved_times(works, rounds=self.rounds, seconds=self.seconds)
        seconds = {name: statistics.median(values) for name, values in times.items()}
        fastest = min(softmax, key=lambda heads: seconds[str(heads)])
        ratios = [a / b for a, b in zip(times["ours"], times[str(fastest)], strict=True)]
        gemm_rate = 2 * GEMM_SIZE**3 / seconds["gemm"]
        return {
            "what": what,
            "backend": self.backend,
            "batch": self.case.batch,
            "length": self.case.length,
            "hidden": self.case.hidden,
            "threads": self.case.threads,
            "ours_ms": 1e3 * seconds["ours"],
            "softmax_ms": {heads: 1e3 * seconds[str(heads)] for heads in softmax},
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "share_of_gemm_peak": None if flops is None else flops / seconds["ours"] / gemm_rate,
            "ours_mib": peak_bytes(ours) / 2**20,
            "softmax_mib": peak_bytes(softmax[fastest]) / 2**20,
        }
