"""``hypermlp bench op``: the operator and the layer against PyTorch's fused softmax attention at the same hidden size."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench.measure import Work, gemm_peak, interleaved_medians, peak_bytes
from hypermlp.bench.softmax import SoftmaxAttention
from hypermlp.budget import core_flops, forward_flops
from hypermlp.layers import Mixer
from hypermlp.ops import available_backends, hyper_attention
from hypermlp.records import new_record, write_record
from hypermlp.testing import op_inputs, randomise_

GEMM_SIZE = 1536


@dataclass
class Row:
    """One measurement. Times in milliseconds, memory in MiB; the ratio is ours over the faster of the softmax head counts."""

    what: str
    backend: str
    batch: int
    length: int
    hidden: int
    ours_ms: float
    softmax_ms: dict[int, float]
    ratio: float
    share_of_gemm_peak: float | None
    ours_mib: float
    softmax_mib: float


def forward_only(layer: Callable[[Tensor], Tensor], x: Tensor) -> Work:
    def work() -> None:
        with torch.no_grad():
            layer(x)

    return work


def forward_backward(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, leaves: list[Tensor]) -> Work:
    def work() -> None:
        torch.autograd.grad(layer(x), leaves, grad)

    return work


class OpBench:
    """All rows of one size, measured with one budget of time."""

    def __init__(self, args: argparse.Namespace, backend: str):
        self.args, self.backend = args, backend
        self.mixer = Mixer.from_label(args.label, hidden_size=args.hidden, max_length=args.length)
        randomise_(self.mixer, scale=0.02)
        self.mixer.backend = backend
        self.softmax = {heads: SoftmaxAttention(args.hidden, heads) for heads in args.softmax_heads}
        self.x = torch.randn(args.batch, args.length, args.hidden)

    def row(self, what: str, ours: Work, softmax: dict[int, Work], flops: int | None) -> Row:
        works: dict[str, Work] = {"ours": ours, "gemm": gemm_peak(size=GEMM_SIZE)}
        works |= {str(heads): work for heads, work in softmax.items()}
        seconds = interleaved_medians(works, rounds=self.args.rounds, seconds=self.args.seconds)
        times = {heads: seconds[str(heads)] for heads in softmax}
        best = min(times, key=times.__getitem__)
        gemm_rate = 2 * GEMM_SIZE**3 / seconds["gemm"]
        return Row(
            what=what,
            backend=self.backend,
            batch=self.args.batch,
            length=self.args.length,
            hidden=self.args.hidden,
            ours_ms=1e3 * seconds["ours"],
            softmax_ms={heads: 1e3 * time for heads, time in times.items()},
            ratio=seconds["ours"] / times[best],
            share_of_gemm_peak=None if flops is None else flops / seconds["ours"] / gemm_rate,
            ours_mib=peak_bytes(ours) / 2**20,
            softmax_mib=peak_bytes(softmax[best]) / 2**20,
        )

    def core(self) -> list[Row]:
        args, config = self.args, self.mixer.config
        inputs = op_inputs(
            batch=args.batch,
            queries=args.length,
            heads=config.num_heads,
            qk_dim=config.qk_dim,
            vo_dim=config.vo_dim,
            rank=config.rank,
            activation=config.activation,
            mixes="1" * config.mix1 + "2" * config.mix2,
            dtype=torch.float32,
        ).requires_grad()

        def ours(_x: Tensor) -> Tensor:
            return hyper_attention(*inputs, activation=config.activation, layout=config.layout, backend=self.backend)

        heads_first = {
            heads: torch.randn(3, args.batch, heads, args.length, args.hidden // heads).unbind(0) for heads in args.softmax_heads
        }
        for q, k, v in heads_first.values():
            for x in (q, k, v):
                x.requires_grad_()

        def theirs(heads: int) -> Callable[[Tensor], Tensor]:
            q, k, v = heads_first[heads]
            return lambda _x: F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with torch.no_grad():
            grad = torch.randn_like(ours(self.x))
        flops = args.batch * core_flops(config, args.length)
        softmax_grads = {heads: torch.randn_like(heads_first[heads][0]) for heads in args.softmax_heads}
        return [
            self.row("core forward", forward_only(ours, self.x), {h: forward_only(theirs(h), self.x) for h in args.softmax_heads}, flops),
            self.row(
                "core forward+backward",
                forward_backward(ours, self.x, grad, inputs.tensors()),
                {h: forward_backward(theirs(h), self.x, softmax_grads[h], list(heads_first[h])) for h in args.softmax_heads},
                3 * flops,
            ),
        ]

    def layer(self) -> list[Row]:
        x = self.x.clone().requires_grad_()
        grad = torch.randn_like(x)
        flops = self.args.batch * forward_flops(self.mixer.config, self.args.length)

        def both(module: nn.Module) -> Work:
            return forward_backward(module, x, grad, [x, *module.parameters()])

        return [
            self.row("layer forward", forward_only(self.mixer, x), {h: forward_only(m, x) for h, m in self.softmax.items()}, flops),
            self.row("layer forward+backward", both(self.mixer), {h: both(m) for h, m in self.softmax.items()}, 3 * flops),
        ]

    @torch.no_grad()
    def decode(self) -> Row:
        args = self.args
        state = self.mixer.new_state(args.batch)
        self.mixer(self.x[:, :-1], state=state)
        token = self.x[:, -1:]

        def ours() -> None:
            with torch.no_grad():
                self.mixer(token, state=state)
            state.crop(args.length - 1)

        caches = {heads: module.cache(args.batch, args.length) for heads, module in self.softmax.items()}

        def theirs(heads: int) -> Work:
            return forward_only(lambda x: self.softmax[heads].step(x, caches[heads]), token)

        return self.row("layer decode one token", ours, {heads: theirs(heads) for heads in args.softmax_heads}, None)

    def run(self) -> list[Row]:
        return [*self.core(), *self.layer(), self.decode()]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| what | backend | B | T | D | ours ms | softmax ms (heads) | ratio | of GEMM peak | ours MiB | softmax MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        softmax = ", ".join(f"{time:.2f} ({heads})" for heads, time in row.softmax_ms.items())
        share = "" if row.share_of_gemm_peak is None else f"{row.share_of_gemm_peak:.0%}"
        cells = [row.what, row.backend, row.batch, row.length, row.hidden, f"{row.ours_ms:.2f}", softmax, f"{row.ratio:.2f}", share]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row.ours_mib:.1f}", f"{row.softmax_mib:.1f}"])) + " |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", default="G-cg-q-12o", help="which mixer (default: HyperGLU)")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--softmax-heads", type=int, nargs="+", help="head counts of the rival; the faster one counts (default: 2 and 12)")
    parser.add_argument("--backend", nargs="+", default=None, help="default: all that are available, except reference")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=15, help="most timed rounds of a row")
    parser.add_argument("--seconds", type=float, default=20, help="stop a row's rounds after this long")
    parser.add_argument("--json", metavar="FILE", help="write a record")


def main(args: argparse.Namespace) -> None:
    for name, least in (("batch", 1), ("length", 2), ("hidden", 1), ("rounds", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}; it must be at least {least}")
    args.softmax_heads = args.softmax_heads or [heads for heads in (2, 12) if args.hidden % heads == 0] or [1]
    for heads in args.softmax_heads:
        if heads < 1 or args.hidden % heads:
            raise ValueError(f"--softmax-heads has {heads}, which does not divide --hidden {args.hidden}")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    backends = args.backend or [name for name in available_backends() if name != "reference"]
    print(
        f"{args.label} against softmax attention, float32, {torch.get_num_threads()} threads; at most {5 * args.seconds:.0f} s per backend",
        flush=True,
    )
    rows = [row for backend in backends for row in OpBench(args, backend).run()]
    print(table(rows))
    if args.json:
        settings: dict[str, Any] = {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, list, type(None)))}
        write_record(args.json, new_record("bench-op", settings, [asdict(row) for row in rows]))
        print(f"record: {args.json}")
