"""The Triton kernels on a GPU: the contract, then time and memory against other attention.

Everything here also runs in Triton's interpreter at small sizes, with times that mean nothing.
"""

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.bench.measure import Row, Work, interleaved_medians, peak_bytes
from hypermlp.bench.op import Computation
from hypermlp.config import MixerConfig
from hypermlp.ops import contract, hyper_attention
from hypermlp.paper.efficiency import LATENCY
from hypermlp.reporting.table import Columns, Table
from hypermlp.testing import op_inputs

FLOAT32 = 2e-5  # relative error against the reference in float64; matrix units round differently
TOLERANCE = {torch.float32: FLOAT32, torch.bfloat16: None}  # None: twice the error of plain PyTorch
SIZES = {"batch": 1, "keys": 150, "heads": 2, "qk_dim": 8, "vo_dim": 8, "rank": 16}
INTERPRETED_SIZES = SIZES | {"keys": 7, "heads": 1, "rank": 3}
SHAPES = [(8, 1024, 768)] + [  # batch, length, hidden size: the paper's, then larger ones
    (max(1, 8192 // length), length, hidden) for hidden in (1024, 2048) for length in (2048, 4096, 8192)
]
PASSES = ("forward", "forward+backward", "decode")


def run_checks(device: str, progress: Callable[[str], None]) -> list[Row]:
    """Run the contract, each case twice; return a row for each dtype. A case that fails is named in its row.

    The results of both runs must have the same bits. In the interpreter there are fewer cases.
    """
    on_gpu = device == "cuda"
    variants, sizes = (contract.VARIANTS, SIZES) if on_gpu else (contract.VARIANTS[:1], INTERPRETED_SIZES)
    cases = [case for case in contract.cases(variants, **sizes) if case.runs_on("triton")]
    rows: list[Row] = []
    with float32_precision("highest"):
        for dtype, tolerance in TOLERANCE.items():
            name, worst, failed = str(dtype).removeprefix("torch."), 0.0, []
            for case in cases:
                progress(f"checking {case}, {name}")
                try:
                    error = contract.check(case, "triton", dtype, device, tolerance=tolerance, repeat=True)
                    worst = max(worst, error)
                except Exception as error:  # a compiler error is a failure of the case, too
                    failed.append(f"{case}, {name}: {str(error).splitlines()[0]}")
            row = {"what": "check", "contender": "triton", "dtype": name, "cases": len(cases)}
            rows.append(row | {"worst_error": worst, "failed": failed})
    return rows


class Contender(NamedTuple):
    """One implementation that is timed."""

    name: str
    backend: str
    dtype: torch.dtype = torch.bfloat16
    precision: str = "highest"


CONTENDERS = (
    Contender("triton", "triton"),
    Contender("blocked", "blocked"),
    Contender("SDPA", "sdpa"),
    Contender("flash-attn", "flash_attn"),
    Contender("triton, float32", "triton", torch.float32),
    Contender("blocked, float32", "blocked", torch.float32),
    Contender("blocked, TF32", "blocked", torch.float32, "high"),
)


def run_timings(
    device: str,
    shapes: list[tuple[int, int, int]],
    contenders: tuple[Contender, ...],
    *,
    rounds: int,
    seconds: float,
    progress: Callable[[str], None],
) -> list[Row]:
    """Time every pass of every contender at every shape; a row says so where one does not run."""
    rows = []
    for (batch, length, hidden), what in itertools.product(shapes, PASSES):
        progress(f"timing {what} at B={batch}, T={length}, D={hidden}")
        for contender in contenders:
            if contender.backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
                continue
            row = {
                "what": what,
                "contender": contender.name,
                "dtype": str(contender.dtype).removeprefix("torch."),
                **{"batch": batch, "length": length, "hidden": hidden},
            }
            try:
                with float32_precision(contender.precision):
                    work = _work(contender, what, batch, length, hidden, device)
                    (ms,) = interleaved_medians(
                        {"work": work}, rounds=rounds, seconds=seconds, device=device
                    ).values()
                    row |= {"ms": 1e3 * ms, "mib": peak_bytes(work, device) / 2**20}
            except (RuntimeError, ImportError) as error:  # out of memory, or not supported
                row["reason"] = str(error).splitlines()[0]
            rows.append(row)
    return rows


def _work(contender: Contender, what: str, batch: int, length: int, hidden: int, device: str) -> Work:
    queries = 1 if what == "decode" else length
    if contender.backend in ("sdpa", "flash_attn"):
        computation = _softmax(contender, batch, queries, length, hidden, device)
    else:
        config = MixerConfig.from_label("G-cg-q-12o", hidden_size=hidden, max_length=length)
        inputs = op_inputs(
            batch=batch,
            queries=queries,
            keys=length,
            heads=config.num_heads,
            qk_dim=config.qk_dim,
            vo_dim=config.vo_dim,
            rank=config.rank,
            dtype=contender.dtype,
            device=device,
        ).requires_grad()
        run = partial(hyper_attention, *inputs, backend=contender.backend)
        computation = Computation(run, inputs.tensors())
    return computation.forward_backward() if what == "forward+backward" else computation.forward()


def _softmax(
    contender: Contender, batch: int, queries: int, keys: int, hidden: int, device: str
) -> Computation:
    """Return causal softmax attention with heads of 64 channels."""
    heads = max(1, hidden // 64)
    shapes = [(batch, count, heads, hidden // heads) for count in (queries, keys, keys)]
    tensors = [
        torch.randn(shape, device=device, dtype=contender.dtype, requires_grad=True) for shape in shapes
    ]
    causal = queries > 1
    if contender.backend == "flash_attn":
        from flash_attn import flash_attn_func

        return Computation(partial(flash_attn_func, *tensors, causal=causal), tensors)

    def run() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Computation(run, tensors)


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Set ``torch.set_float32_matmul_precision`` within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _outcome(row: Row) -> str:
    if row["what"] == "check":
        passed = row["cases"] - len(row["failed"])
        failed = f"; failed: {'; '.join(row['failed'])}" if row["failed"] else ""
        allowed = f"{FLOAT32:g} allowed" if row["dtype"] == "float32" else "twice plain PyTorch's allowed"
        return f"{passed} of {row['cases']} cases, worst error {row['worst_error']:.2g}, {allowed}{failed}"
    return f"{row['ms']:.3f} ms, {row['mib']:.1f} MiB" if "ms" in row else f"did not run: {row['reason']}"


COLUMNS: Columns = [
    ("what", "{what}"),
    ("contender", "{contender}"),
    ("dtype", "{dtype}"),
    ("B", lambda row: str(row.get("batch", ""))),
    ("T", lambda row: str(row.get("length", ""))),
    ("D", lambda row: str(row.get("hidden", ""))),
    ("outcome", _outcome),
]


def table(rows: list[Row]) -> Table:
    """Return the table of the rows of ``run_checks`` and ``run_timings``."""
    return Table.of(rows, COLUMNS, left=frozenset({"contender", "dtype", "outcome"}))


def paper_table() -> Table:
    """Return the paper's latency table."""
    rows = [{"mixer": name, "forward": 1e3 * f, "training": 1e3 * t} for name, (f, t) in LATENCY.items()]
    columns: Columns = [
        ("mixer", "{mixer}"),
        ("forward, ms", "{forward:.1f}"),
        ("training step, ms", "{training:.1f}"),
    ]
    return Table.of(rows, columns)
