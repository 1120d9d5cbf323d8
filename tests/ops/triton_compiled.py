"""The kernels of the backend "triton", compiled without a GPU: registers, spills, shared memory, wide loads.

tests/ops/test_triton.py runs this file in a process of its own, in which nothing is interpreted. The numbers:

    python -m pytest -s -m "" tests/ops/triton_compiled.py -k resources
"""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from hypermlp.ops.layer import LayerWeights, RingStepArguments
from hypermlp.ops.triton import elementwise, interpreting
from hypermlp.ops.triton import step as decoding
from hypermlp.ops.triton.launch import Launch, recording

sys.path.insert(0, str(Path(__file__).parent))
from triton_launches import plan

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")
SIZES = {"qk_dim": 192, "vo_dim": 384}  # D = 768, two heads
HOT = {"inner", "activate", "activate_backward", "parameters", "parameters 2"}
MOST_SHARED = 48 << 10
MOST_REGISTERS = {  # triton 3.9.0, over targets and dtypes; of all others 254
    "conv_forward": 72,
    "conv_backward": 172,
    "gates_forward": 40,
    "gates_backward": 40,
    "product_backward": 40,
    "step_conv": 40,
    "step_gates": 40,
}
ASYNCHRONOUS = r"\bLDGSTS\.E\.BYPASS\.128\b"


class Usage(NamedTuple):
    """What one program of a kernel occupies."""

    registers: int
    """Registers of a thread (vector registers on AMD GPUs)."""
    spilled: int
    """Bytes of a thread's stack (registers that were spilled, on AMD GPUs)."""
    shared: int
    """Bytes of shared memory."""


def variants(dtype: torch.dtype, rank: int) -> dict[str, Launch]:
    """Return one launch of each kernel of HyperGLU by its name; the second use of one has a number."""
    sizes: dict[str, Any] = SIZES | {"rank": rank, "dtype": dtype}
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


def elementwise_launches(dtype):
    """The launches of a layer of width 768 around the operator, by name."""
    assert not interpreting()
    x, weight = torch.empty(8, 1024, 768, dtype=dtype, device="meta"), torch.empty(768, 4, device="meta")
    reach = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    sizes = [192, 768, 64, 32]
    logits, q = (torch.empty(8, 1024, n, dtype=dtype, device="meta") for n in (sum(sizes), 192))
    with recording() as record:
        outs = elementwise.conv(x, [weight, weight], 1024, reach)
        elementwise.conv_gradients(outs, x, [weight, weight], 1024, reach)
        elementwise.gates_grad(elementwise.gates(logits, q, sizes), logits, q, sizes)
        elementwise.product_grad(x, x, x)
        record_step(dtype)
    return {one.name: one for one in record.launches if one.name in MOST_REGISTERS}


def record_step(dtype):
    """One step of HyperGLU, width 768, on rings of 1024 rows; the operator's kernels are in ``variants``."""
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    mixes = [empty(heads, 1024, *rank) for heads in (4, 2) for rank in ((), (16,), (16,))]
    projections = [empty(192, 768), empty(192, 768), empty(768, 768), empty(768, 768)]
    convs, gates = [empty(768, 4)] * 2, [empty(1056, 768), empty(1056)]
    options = [0, 192, 960, 1024, "glu", "lag", 1e-12]
    weights = LayerWeights._make([*convs, *projections, *gates, *mixes, *options])
    past = torch.empty((), dtype=torch.int64, device="meta")
    rings = (empty(8, 131, 768), empty(8, 1024, 4, 48), empty(8, 1024, 2, 384))
    decoding.step(RingStepArguments(empty(8, 1, 768), weights, *rings, past, None, None))


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
    types, hints = _signature(one)
    source = ASTSource(one.kernel, types, _constants(one), hints)
    gpu = (
        GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        if target.startswith("sm_")
        else GPUTarget("hip", target, 64)
    )
    options = {name: one.arguments[name] for name in OPTIONS if name in one.arguments}
    return compile_source(source, target=gpu, options={**options, "enable_fp_fusion": True})


def _tool(name: str, *arguments: str, code: bytes) -> str:
    """Run a tool of the Triton wheel on machine code."""
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


def occupied(launches: dict[str, Launch], target: str) -> dict[str, Usage]:
    """Compile launches, print what each occupies, and return it."""
    found = {name: usage(compile_kernel(one, target)) for name, one in launches.items()}
    for name, used in found.items():
        print(target, name, *used)
    return found


def cases(*fast):
    every = [
        (target, dtype, rank)
        for target in TARGETS
        for dtype in (torch.float32, torch.bfloat16)
        for rank in (16, 32)
    ]
    return [pytest.param(*one, marks=() if one == fast else pytest.mark.slow) for one in every]


@pytest.mark.parametrize(("target", "dtype", "rank"), cases("sm_80", torch.bfloat16, 16))
def test_resources(target, dtype, rank):
    found = occupied(variants(dtype, rank), target)
    assert len(found) >= 15
    for name, used in found.items():
        assert used.registers < 255 or target == "gfx942", name
        assert used.shared <= MOST_SHARED, name
        if rank == 16 and dtype == torch.bfloat16:
            assert used.spilled == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", ["sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in TARGETS[1:])])
def test_resources_around_the_operator(target, dtype):
    launches = elementwise_launches(dtype)
    found = occupied(launches, target)
    assert set(found) == set(MOST_REGISTERS)
    for name, used in found.items():
        assert used.spilled == 0, name
        assert used.registers <= MOST_REGISTERS[name], name
        if target == "sm_80":
            code = machine_code(compile_kernel(launches[name], target))
            assert "LDG.E.128" in code or "LDG.E.64" in code, name  # no scalar loads


def test_hot_kernels_load_vectors_asynchronously():
    found = variants(torch.bfloat16, 16)
    assert set(found) >= HOT
    for name in HOT:
        assert re.search(ASYNCHRONOUS, machine_code(compile_kernel(found[name], "sm_80"))), name


def test_without_residue_classes_there_are_no_such_loads_of_scores():
    """The check above can fail: rows that begin anywhere are loaded cell by cell."""
    sizes = SIZES | {"batch": 8, "queries": 256, "layout": "forward", "starts": True}
    launches = plan(**sizes).forward.launches
    (inner, *_) = (one for one in launches if one.name == "inner")
    code = machine_code(compile_kernel(inner, "sm_80"))
    aligned = machine_code(compile_kernel(variants(torch.bfloat16, 16)["inner"], "sm_80"))
    assert len(re.findall(ASYNCHRONOUS, code)) < len(re.findall(ASYNCHRONOUS, aligned))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_other_variants_compile(target):
    """relu, absent mixes, both layouts with starts, an odd rank, decoding; and float64 where a GPU has it."""
    for changes in (
        {"activation": "relu", "mixes": ""},
        {"activation": "relu", "mixes": "1", "layout": "forward", "starts": True},
        {"mixes": "2", "starts": True, "rank": 17},
        {"mixes": ""},
        {"dtype": torch.float64},
    ):
        for queries in (1, 200):
            planned = plan(batch=2, queries=queries, keys=200, **SIZES, **changes)
            seen = set()
            for one in (*planned.forward.launches, *planned.backward.launches):
                if one.kernel is not None and one.name not in seen:
                    seen.add(one.name)
                    compile_kernel(one, target)
