"""Registers, spills and shared memory of every kernel, compiled without a GPU; and the machine code itself.

    python -m hypermlp.ops.triton.resources              write the table beside this file (about 15 minutes)
    python -m hypermlp.ops.triton.resources --markdown   print the written table for docs/gpu.md

The variants are those that the launcher asks for: HyperGLU with both mixes in layout "lag".
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops.triton.launch import Launch
from hypermlp.ops.triton.planning import plan

TABLE = Path(__file__).with_name("resources.json")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANKS = (16, 32)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")


class Usage(NamedTuple):
    """What one program of a kernel occupies."""

    registers: int
    """Registers of a thread (vector registers on AMD GPUs)."""
    spilled: int
    """Bytes of a thread's stack (registers that were spilled, on AMD GPUs)."""
    shared: int
    """Bytes of shared memory."""


def variants(dtype: torch.dtype, rank: int) -> dict[str, Launch]:
    """Return one launch of each kernel, by its name; the second use of a kernel has a number behind it."""
    sizes: dict[str, Any] = {"qk_dim": 192, "vo_dim": 384, "rank": rank, "dtype": dtype}
    many, few = plan(batch=8, queries=1024, **sizes), plan(batch=1, queries=128, keys=8192, **sizes)
    step = plan(batch=8, queries=1, keys=1024, **sizes)
    found: dict[tuple[Any, ...], tuple[str, Launch]] = {}
    for one in (
        *many.forward.launches,
        *many.backward.launches,
        *few.backward.launches,
        *step.forward.launches,
    ):
        if one.kernel is None:
            continue
        key = (one.name, *((k, v) for k, v in sorted(_signature(one)[0].items())), *_constants(one).items())
        if key not in found:
            uses = sum(name.split(" ")[0] == one.name for name, _ in found.values())
            found[key] = (one.name if not uses else f"{one.name} {uses + 1}", one)
    return dict(found.values())


def _signature(one: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Return the types of a kernel's arguments, and which of them are multiples of 16."""
    types: dict[str, str] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(one.kernel.arg_names):
        value = one.arguments[name]
        if one.kernel.params[i].is_constexpr or value is None:
            types[name] = "constexpr"
        elif isinstance(value, Tensor):
            types[name] = POINTERS[value.dtype]
            hints[(i,)] = [["tt.divisibility", 16]]
        else:
            types[name] = "i32"
            if value % 16 == 0 and not one.kernel.params[i].do_not_specialize:
                hints[(i,)] = [["tt.divisibility", 16]]
    return types, hints


def _constants(one: Launch) -> dict[str, Any]:
    types, _ = _signature(one)
    return {name: one.arguments[name] for name, kind in types.items() if kind == "constexpr"}


def compile_kernel(one: Launch, target: str) -> Any:
    """Compile a launched kernel for "sm_80" and the like, or for "gfx942"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, hints = _signature(one)
    source = ASTSource(one.kernel, types, _constants(one), hints)
    gpu = (
        GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        if target.startswith("sm_")
        else GPUTarget("hip", target, 64)
    )
    options = {name: one.arguments[name] for name in OPTIONS if name in one.arguments}
    return triton.compile(source, target=gpu, options={**options, "enable_fp_fusion": True})


def _tool(name: str, *arguments: str, code: bytes) -> str:
    """Run a tool of the Triton wheel on machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [getattr(knobs.nvidia, name).path, *arguments, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def usage(compiled: Any) -> Usage:
    """Return what a compiled kernel occupies."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        text = _tool("cuobjdump", "-res-usage", code=compiled.asm["cubin"])
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, text
        return Usage(int(found[1]), int(found[2]), shared)
    text = compiled.asm["amdgcn"]
    numbers = [re.search(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count")]
    registers, spilled = (int(number[1]) for number in numbers if number)
    return Usage(registers, spilled, shared)


def machine_code(compiled: Any) -> str:
    """Return the SASS of a kernel that was compiled for an NVIDIA GPU."""
    return _tool("cuobjdump", "-sass", code=compiled.asm["cubin"])


def measure(
    targets: tuple[str, ...], dtypes: tuple[str, ...], ranks: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Yield a row of the table for each kernel, target, dtype and rank."""
    for target in targets:
        for dtype in dtypes:
            for rank in ranks:
                for name, one in variants(DTYPES[dtype], rank).items():
                    used = usage(compile_kernel(one, target))
                    yield {
                        "kernel": name,
                        "target": target,
                        "dtype": dtype,
                        "rank": rank,
                        "tile": [one.arguments.get("BM", 0), one.arguments.get("BN", 0)],
                        "warps": one.arguments.get("num_warps", 4),
                        **used._asdict(),
                    }


def write(path: Path = TABLE) -> None:
    """Compile everything and write the table."""
    import triton

    rows = []
    for row in measure(TARGETS, tuple(DTYPES), RANKS):
        rows.append(row)
        print(row, flush=True)
    aside = path.with_suffix(".new")
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    command = "python -m hypermlp.ops.triton.resources"
    head = f'"command": "{command}",\n  "triton": "{triton.__version__}"'
    aside.write_text(f'{{\n  {head},\n  "kernels": [\n    {lines}\n  ]\n}}\n')
    os.replace(aside, path)


def markdown(path: Path = TABLE) -> str:
    """Return the table for a document: registers / spilled bytes / shared bytes, one column per target."""
    rows = json.loads(path.read_text())["kernels"]
    cells = {(r["dtype"], r["rank"], r["kernel"], r["target"]): r for r in rows}
    lines = [
        f"| dtype | rank | kernel | {' | '.join(TARGETS)} |",
        f"| --- | --- | --- |{' --- |' * len(TARGETS)}",
    ]
    for key in dict.fromkeys(key[:3] for key in cells):
        used = (cells[(*key, target)] for target in TARGETS)
        values = " | ".join(f"{r['registers']} / {r['spilled']} / {r['shared']}" for r in used)
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the written table instead of making it"
    )
    if parser.parse_args().markdown:
        print(markdown())
    else:
        write()
