"""What a call launches: kernels, programs and scratch, counted by the launcher itself on tensors without
contents. ``python tests/ops/triton_launches.py`` prints the table of docs/gpu.md.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hypermlp.ops.arguments import Attention, Mix
from hypermlp.ops.triton import tiles
from hypermlp.ops.triton.backward import backward
from hypermlp.ops.triton.forward import forward
from hypermlp.ops.triton.launch import Launch, recording, use_settings

NO_LAUNCH = ("empty", "new_empty", "detach", "promote_types")


class Pass(NamedTuple):
    """The launches of one pass."""

    launches: list[Launch]
    """Our kernels and the GEMMs, in their order."""
    other: int
    """Other launches of PyTorch: copies, sums of parameters."""
    scratch: dict[str, int]
    """Bytes of each scratch buffer; those of the scores are shared by all chunks."""

    @property
    def scratch_bytes(self) -> int:
        return sum(self.scratch.values())

    @property
    def total(self) -> int:
        """All launches."""
        return len(self.launches) + self.other

    def programs(self, name: str) -> list[int]:
        """Return the programs of each launch of one kernel."""
        return [launch.programs for launch in self.launches if launch.name == name]

    def summary(self) -> dict[str, Any]:
        """Return launches by name, the most programs of each kernel, and the scratch in bytes."""
        names = Counter(launch.name for launch in self.launches)
        most = {name: max(self.programs(name)) for name in names if name != "gemm"}
        return {
            "launches": {**names, "other": self.other},
            "most_programs": most,
            "scratch_bytes": self.scratch_bytes,
        }


class Plan(NamedTuple):
    """What a forward and a backward pass launch."""

    forward: Pass
    backward: Pass


def plan(
    *,
    batch: int,
    queries: int,
    keys: int | None = None,
    heads: int = 2,
    qk_dim: int,
    vo_dim: int,
    rank: int = 16,
    mixes: str = "12",
    activation: str = "glu",
    layout: str = "lag",
    starts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    l2_bytes: int = tiles.L2_BYTES,
) -> Plan:
    """Return what the operator would launch for these sizes on a GPU with this level-2 cache.

    Example::

        plan(batch=8, queries=1024, qk_dim=192, vo_dim=384).forward.summary()
    """
    keys = queries if keys is None else keys
    branches = 2 * heads if activation == "glu" else heads

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def mix(count: int) -> Mix:
        return Mix(
            empty(count, keys),
            empty(count, keys, rank),
            empty(count, keys, rank),
            empty(batch, queries, count, rank),
        )

    arguments = Attention(
        empty(batch, queries, branches, qk_dim),
        empty(batch, keys, branches, qk_dim),
        empty(batch, keys, heads, vo_dim),
        mix(branches) if "1" in mixes else None,
        mix(heads) if "2" in mixes else None,
        empty(batch, queries, dtype=torch.int64) if starts else None,
        activation,
        layout,
        1e-12,
    )
    with use_settings(scratch_bytes=int(tiles.L2_SHARE * l2_bytes)):
        with recording() as ahead, _Others() as others:
            out, saved = forward(arguments)
        with recording() as back, _Others() as others_back:
            backward(torch.empty_like(out), out, saved, arguments)
    return Plan(
        Pass(ahead.launches, others.count, ahead.scratch),
        Pass(back.launches, others_back.count, back.scratch),
    )


class _Others(TorchDispatchMode):
    """Count PyTorch's operators that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        self.count += not func.is_view and not name.startswith(NO_LAUNCH)
        return func(*args, **(kwargs or {}))


SHAPES = ((8, 1024, 768), (1, 8192, 768), (4, 2048, 1024), (1, 8192, 1024), (1, 8192, 2048))
"""Batch, length and hidden size of the table in docs/gpu.md."""


def shapes_table() -> str:
    """Return launches, programs and scratch of HyperGLU in bfloat16 at SHAPES, as Markdown."""
    lines = ["| B, T, D | pass | launches | fewest and most programs of a kernel | scratch, MiB |"]
    lines.append("| --- | --- | ---: | --- | ---: |")
    for batch, length, hidden in SHAPES:
        planned = plan(batch=batch, queries=length, qk_dim=hidden // 16, vo_dim=hidden // 2)
        for name, one in zip(planned._fields, planned, strict=True):
            most = one.summary()["most_programs"].values()
            programs = f"{min(most):,} and {max(most):,}"
            size = f"{one.scratch_bytes / 2**20:.1f}"
            lines.append(f"| {batch}, {length}, {hidden} | {name} | {one.total} | {programs} | {size} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(shapes_table())
