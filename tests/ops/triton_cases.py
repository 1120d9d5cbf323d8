"""The cases of the operator's contract that run in Triton's interpreter, and how one is run.

Interpreted kernels are slow, so shapes are small and most cases use two residue classes instead of eight.
"""

import itertools
from typing import NamedTuple

import torch

from hypermlp.ops import Mix, hyper_attention
from hypermlp.ops.triton.launch import use_settings
from hypermlp.testing import OpInputs, op_inputs

PATTERNS = ("all", "padding", "packed", "window", "nothing")
SHAPES = ((1, 1), (13, 13), (1, 11), (6, 17), (23, 23))
MUCH = 1 << 30
VARIANTS = [
    (activation, mixes, layout)
    for activation, mixes, layout in itertools.product(
        ("relu", "glu"), ("", "1", "2", "12"), ("lag", "forward")
    )
    if mixes or layout == "lag"
]
NAMES = ("output", "q", "k", "v", *(f"mix{i}.{field}" for i in (1, 2) for field in Mix._fields))


class Case(NamedTuple):
    """One call, forward and backward."""

    activation: str = "glu"
    mixes: str = "12"
    layout: str = "lag"
    pattern: str = "all"
    queries: int = 13
    keys: int = 13
    batch: int = 1
    heads: int = 1
    rank: int = 3
    residues: int = 2
    rows: int = 8
    """GrowingRows of a chunk."""
    programs: int = 4
    """Programs at which a kernel is no longer split over slots."""
    scratch: int = 1
    """Bytes of scratch that a chunk may take; too few for more than one sequence and ``rows`` rows."""

    def inputs(self, dtype: torch.dtype) -> OpInputs:
        sizes = {name: getattr(self, name) for name in ("queries", "keys", "batch", "heads", "rank")}
        return op_inputs(**sizes, activation=self.activation, mixes=self.mixes, dtype=dtype)

    def starts(self) -> torch.Tensor | None:
        position = torch.arange(self.keys - self.queries, self.keys)
        return {
            "all": None,
            "padding": torch.tensor([3, 0, 5])[: self.batch].clamp(max=self.keys),
            "packed": torch.stack([position // (4 + b) * (4 + b) for b in range(self.batch)]),
            "window": (position - 4).clamp(min=0).expand(self.batch, -1),
            "nothing": (position + 1).expand(self.batch, -1),
        }[self.pattern]

    def options(self) -> dict[str, object]:
        return {"activation": self.activation, "layout": self.layout, "starts": self.starts()}

    def settings(self):
        return use_settings(
            residues=self.residues,
            rows=self.rows,
            programs=self.programs,
            decode_programs=self.programs,
            scratch_bytes=self.scratch,
        )

    def names(self) -> list[str]:
        present = NAMES[:4] + NAMES[4:8] * ("1" in self.mixes) + NAMES[8:] * ("2" in self.mixes)
        return list(present)

    def __str__(self) -> str:
        parts = [
            f"{name[0] if isinstance(value, int) else ''}{value}" for name, value in self._asdict().items()
        ]
        return "-".join(parts)


def all_cases() -> list[Case]:
    """Every variant with every pattern and shape; then ranks, eight residue classes, batches, splits."""
    cases = [
        Case(*variant, pattern, queries, keys)
        for variant, pattern, (queries, keys) in itertools.product(VARIANTS, PATTERNS, SHAPES)
    ]
    ways = (("lag", "all"), ("lag", "window"), ("forward", "all"), ("forward", "packed"))
    for activation, rank, (layout, pattern) in itertools.product(("relu", "glu"), (1, 16, 17, 32), ways):
        cases.append(Case(activation, "12", layout, pattern, 6, 17, rank=rank))
    for variant, pattern in itertools.product(VARIANTS, ("all", "packed")):
        cases.append(Case(*variant, pattern, 9, 21, residues=8, rows=16))
    for layout, pattern in itertools.product(("lag", "forward"), PATTERNS):
        cases.append(
            Case("glu", "12", layout, pattern, 7, 14, batch=3, heads=2, rows=4, programs=1, scratch=MUCH)
        )
        cases.append(Case("relu", "12", layout, pattern, 11, 14, batch=3, heads=2, rows=6, scratch=60_000))
        cases.append(Case("glu", "12", layout, pattern, 5, 40, batch=2, programs=64, rows=64))
    cases.append(Case(queries=40, keys=40, residues=8, rows=16, heads=2))
    return cases


def fast_cases() -> list[Case]:
    """A case of every variant, in turn over patterns, shapes, ranks; eight residue classes in one of them."""
    shapes, ranks = ((5, 11), (1, 70), (7, 7)), (3, 16, 17)
    cases = [
        Case(*variant, PATTERNS[i % 5], *shapes[i % 3], rank=ranks[i % 3])
        for i, variant in enumerate(VARIANTS)
    ]
    return [*cases[:-2], cases[-2]._replace(residues=8), cases[-1]]


def run(
    case: Case, inputs: OpInputs, backend: str = "triton", cotangent_scale: float = 1.0
) -> list[torch.Tensor]:
    """Return the output, and the gradients of all tensors for a fixed random cotangent."""
    inputs = inputs.to(inputs.q.dtype).requires_grad()
    with case.settings():
        out = hyper_attention(*inputs, **case.options(), backend=backend)
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        return [out, *torch.autograd.grad(out, inputs.tensors(), cotangent * cotangent_scale)]
