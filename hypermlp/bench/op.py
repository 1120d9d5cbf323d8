"""``hypermlp bench op``: the operator and the layer against PyTorch's fused softmax attention at the same hidden size."""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypermlp.bench.gate import check_backend
from hypermlp.bench.measure import WARMUPS, Work, gemm_peak, interleaved_medians, peak_bytes
from hypermlp.bench.softmax import SoftmaxAttention
from hypermlp.config import MixerConfig
from hypermlp.costs.mixer import core_flops, forward_flops
from hypermlp.errors import UserError
from hypermlp.layers import Mixer
from hypermlp.ops import available_backends, hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.reporting.records import check_writable, new_record, write_record
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
    threads: int
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


def forward_backward(
    layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, leaves: list[Tensor]
) -> Work:
    def work() -> None:
        torch.autograd.grad(layer(x), leaves, grad)

    return work


@dataclass(frozen=True)
class Case:
    """One size, and what of it to measure."""

    batch: int
    length: int
    hidden: int
    threads: int
    parts: tuple[str, ...] = ("core", "layer", "decode")


def sweep_cases(threads: int) -> list[Case]:
    """Lengths at width 768, widths at length 1024, one thread, short sequences of small models, decoding."""
    training = ("core", "layer")
    cases = [
        Case(2 if length <= 2048 else 1, length, 768, threads, training)
        for length in (128, 256, 512, 1024, 2048, 4096, 8192)
    ]
    cases += [Case(2, 1024, hidden, threads, training) for hidden in (128, 256, 1024)]
    cases += [Case(32, 128, 128, threads, training), Case(2, 1024, 768, 1, training)]
    cases += [
        Case(batch, length, 768, threads, ("decode",)) for length in (256, 1024, 4096) for batch in (1, 8)
    ]
    return cases


class OpBench:
    """All rows of one case."""

    def __init__(self, args: argparse.Namespace, case: Case, backend: str):
        self.args, self.case, self.backend = args, case, backend
        self.heads = args.softmax_heads or [heads for heads in (2, 12) if case.hidden % heads == 0] or [1]
        self.mixer = Mixer.from_label(args.label, hidden_size=case.hidden, max_length=case.length)
        randomise_(self.mixer, scale=0.02)
        self.mixer.backend = backend
        self.softmax = {heads: SoftmaxAttention(case.hidden, heads) for heads in self.heads}
        self.x = torch.randn(case.batch, case.length, case.hidden)

    def row(self, what: str, ours: Work, softmax: dict[int, Work], flops: int | None) -> Row:
        works: dict[str, Work] = {"ours": ours, "gemm": gemm_peak(GEMM_SIZE)}
        works |= {str(heads): work for heads, work in softmax.items()}
        seconds = interleaved_medians(works, rounds=self.args.rounds, seconds=self.args.seconds)
        times = {heads: seconds[str(heads)] for heads in softmax}
        best = min(times, key=times.__getitem__)
        gemm_rate = 2 * GEMM_SIZE**3 / seconds["gemm"]
        return Row(
            what=what,
            backend=self.backend,
            batch=self.case.batch,
            length=self.case.length,
            hidden=self.case.hidden,
            threads=self.case.threads,
            ours_ms=1e3 * seconds["ours"],
            softmax_ms={heads: 1e3 * time for heads, time in times.items()},
            ratio=seconds["ours"] / times[best],
            share_of_gemm_peak=None if flops is None else flops / seconds["ours"] / gemm_rate,
            ours_mib=peak_bytes(ours) / 2**20,
            softmax_mib=peak_bytes(softmax[best]) / 2**20,
        )

    def core(self) -> list[Row]:
        case, config = self.case, self.mixer.config
        inputs = op_inputs(
            batch=case.batch,
            queries=case.length,
            heads=config.num_heads,
            qk_dim=config.qk_dim,
            vo_dim=config.vo_dim,
            rank=config.rank,
            activation=config.activation,
            mixes="1" * config.mix1 + "2" * config.mix2,
            dtype=torch.float32,
        ).requires_grad()

        def ours(_x: Tensor) -> Tensor:
            return hyper_attention(
                *inputs, activation=config.activation, layout=config.layout, backend=self.backend
            )

        heads_first = {
            heads: torch.randn(3, case.batch, heads, case.length, case.hidden // heads).unbind(0)
            for heads in self.heads
        }
        for q, k, v in heads_first.values():
            for x in (q, k, v):
                x.requires_grad_()

        def theirs(heads: int) -> Callable[[Tensor], Tensor]:
            q, k, v = heads_first[heads]
            return lambda _x: F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with torch.no_grad():
            grad = torch.randn_like(ours(self.x))
        flops = case.batch * core_flops(config, case.length)
        softmax_grads = {heads: torch.randn_like(heads_first[heads][0]) for heads in self.heads}
        return [
            self.row(
                "core forward",
                forward_only(ours, self.x),
                {h: forward_only(theirs(h), self.x) for h in self.heads},
                flops,
            ),
            self.row(
                "core forward+backward",
                forward_backward(ours, self.x, grad, inputs.tensors()),
                {
                    h: forward_backward(theirs(h), self.x, softmax_grads[h], list(heads_first[h]))
                    for h in self.heads
                },
                3 * flops,
            ),
        ]

    def layer(self) -> list[Row]:
        x = self.x.clone().requires_grad_()
        grad = torch.randn_like(x)
        flops = self.case.batch * forward_flops(self.mixer.config, self.case.length)

        def both(module: nn.Module) -> Work:
            return forward_backward(module, x, grad, [x, *module.parameters()])

        return [
            self.row(
                "layer forward",
                forward_only(self.mixer, x),
                {h: forward_only(m, x) for h, m in self.softmax.items()},
                flops,
            ),
            self.row(
                "layer forward+backward",
                both(self.mixer),
                {h: both(m) for h, m in self.softmax.items()},
                3 * flops,
            ),
        ]

    @torch.no_grad()
    def decode(self) -> Row:
        """From position ``length`` on: every call decodes one more, as in use."""
        case = self.case
        longest = case.length + WARMUPS + self.args.rounds + 8
        mixer = Mixer.from_label(self.args.label, hidden_size=case.hidden, max_length=longest)
        randomise_(mixer, scale=0.02)
        mixer.backend = self.backend
        state = mixer.new_state(case.batch)
        mixer(self.x[:, :-1], state=state)
        token = self.x[:, -1:]

        def ours() -> None:
            with torch.no_grad():
                mixer(token, state=state)

        caches = {heads: module.cache(case.batch, case.length) for heads, module in self.softmax.items()}

        def theirs(heads: int) -> Work:
            return forward_only(lambda x: self.softmax[heads].step(x, caches[heads]), token)

        return self.row("layer decode one token", ours, {heads: theirs(heads) for heads in self.heads}, None)

    def run(self) -> list[Row]:
        parts = {"core": self.core, "layer": self.layer, "decode": lambda: [self.decode()]}
        return [row for part in self.case.parts for row in parts[part]()]


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| what | backend | B | T | D | threads | ours ms | softmax ms (heads) | ratio | of GEMM peak | ours MiB | softmax MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        softmax = ", ".join(f"{time:.2f} ({heads})" for heads, time in row.softmax_ms.items())
        share = "" if row.share_of_gemm_peak is None else f"{row.share_of_gemm_peak:.0%}"
        cells = [
            row.what,
            row.backend,
            row.batch,
            row.length,
            row.hidden,
            row.threads,
            f"{row.ours_ms:.2f}",
            softmax,
            f"{row.ratio:.2f}",
            share,
        ]
        lines.append(
            "| " + " | ".join(map(str, [*cells, f"{row.ours_mib:.1f}", f"{row.softmax_mib:.1f}"])) + " |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", default="G-cg-q-12o", help="which mixer (default: HyperGLU)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (default: 2)")
    parser.add_argument("--length", type=int, default=1024, help="positions (default: 1024)")
    parser.add_argument("--hidden", type=int, default=768, help="width (default: 768)")
    parser.add_argument(
        "--softmax-heads",
        type=int,
        nargs="+",
        help="head counts of the rival; the faster one counts (default: 2 and 12)",
    )
    parser.add_argument(
        "--backend", nargs="+", default=None, help="default: all that are available, except reference"
    )
    parser.add_argument("--threads", type=int, default=None, help="default: as many as PyTorch takes")
    parser.add_argument("--rounds", type=int, default=15, help="most timed rounds of a row (default: 15)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="stop a row's rounds after so many seconds (default: 20)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="many sizes instead of one: lengths, widths, threads, decoding"
    )
    parser.add_argument("--json", metavar="FILE", help="write a record")


def main(args: argparse.Namespace) -> None:
    for name, least in (("batch", 1), ("length", 2), ("hidden", 1), ("rounds", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}; it must be at least {least}")
    for heads in args.softmax_heads or []:
        if args.sweep:
            raise UserError("--softmax-heads does not go with --sweep, which has many widths")
        if heads < 1 or args.hidden % heads:
            raise UserError(f"--softmax-heads has {heads}, which does not divide --hidden {args.hidden}")
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds is {args.seconds}; it must be positive and finite")
    if args.json:
        check_writable(args.json)
    threads = args.threads or torch.get_num_threads()
    cases = sweep_cases(threads) if args.sweep else [Case(args.batch, args.length, args.hidden, threads)]
    configs = [
        MixerConfig.from_label(args.label, hidden_size=case.hidden, max_length=case.length) for case in cases
    ]
    activation = configs[0].activation
    able = [
        name
        for name in available_backends()
        if BACKENDS[name].refusal(Request("attention", "cpu", torch.float32, activation, mixed=True)) is None
    ]
    backends = args.backend or [name for name in able if name != "reference"]
    minutes = len(backends) * sum(4 * len(case.parts) for case in cases) * args.seconds / 60
    sizes = "one size" if len(cases) == 1 else f"{len(cases)} sizes"
    print(
        f"{args.label} against softmax attention, float32; {sizes}, {max(1, round(minutes))} minutes at most",
        flush=True,
    )
    for backend in backends:
        print(f"{backend}: {check_backend(backend)} cases equal the reference", flush=True)
    rows: list[Row] = []
    for done, (case, backend) in enumerate(itertools.product(cases, backends), 1):
        torch.set_num_threads(case.threads)
        rows += OpBench(args, case, backend).run()
        if args.sweep:
            print(f"{done} of {len(cases) * len(backends)}: {backend} {case}", file=sys.stderr, flush=True)
    print(table(rows))
    if args.json:
        settings: dict[str, Any] = {
            k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, list, type(None)))
        }
        write_record(args.json, new_record("bench-op", settings, [asdict(row) for row in rows]))
        print(f"record: {args.json}")
