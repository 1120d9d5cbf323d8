"""The elementwise kernels compiled without a GPU: registers, spills, wide loads.

tests/ops/test_triton_elementwise.py runs this file in a process of its own: Triton's interpreter, which other
tests use, cannot compile.

    python -m pytest tests/ops/triton_resources.py
"""

import functools

import pytest
import torch

from hypermlp.ops.triton import elementwise, interpreting
from hypermlp.ops.triton import step as decoding
from hypermlp.ops.triton.launch import recording
from hypermlp.ops.triton.resources import compile_kernel, machine_code, usage

OTHERS = ("sm_89", "sm_90", "sm_100", "gfx942")
TARGETS = ("sm_80", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
MOST_REGISTERS = {  # triton 3.9.0, over targets and dtypes
    "conv_forward": 72,
    "conv_backward": 172,
    "gates_forward": 40,
    "gates_backward": 40,
    "product_backward": 40,
    "step_conv": 40,
    "step_gates": 40,
}


def launches(dtype):
    """The launches of a layer of width 768, by name."""
    assert not interpreting()
    x, weight = torch.empty(8, 1024, 768, dtype=dtype, device="meta"), torch.empty(768, 4, device="meta")
    reach = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    sizes = [192, 768, 64, 32]
    logits, q = (torch.empty(8, 1024, n, dtype=dtype, device="meta") for n in (sum(sizes), 192))
    with recording() as record:
        outs = elementwise.conv_pair(x, weight, weight, 1024, reach)
        elementwise.conv_pair_backward(*outs, x, weight, weight, 1024, reach)
        elementwise.gates_grad(elementwise.gates(logits, q, sizes), logits, q, sizes)
        elementwise.product_grad(x, x, x)
        record_step(dtype)
    return {one.name: one for one in record.launches if one.name in MOST_REGISTERS}


def record_step(dtype):
    """One step of HyperGLU, width 768, on rings of 1024 rows; the operator's kernels are in the table."""
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    mixes = [empty(heads, 1024, *rank) for heads in (4, 2) for rank in ((), (16,), (16,))]
    decoding.step(
        empty(8, 1, 768),
        empty(8, 131, 768),
        (empty(768, 4), empty(768, 4)),
        [empty(192, 768), empty(192, 768), empty(768, 768), empty(768, 768)],
        (empty(1056, 768), empty(1056)),
        [192, 768, 64, 32],
        empty(8, 1024, 4, 48),
        empty(8, 1024, 2, 384),
        torch.empty((), dtype=torch.int64, device="meta"),
        mixes,
        None,
        None,
        ("glu", "lag", 1e-12),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_registers_and_spills(target, dtype):
    found = {}
    for name, one in launches(dtype).items():
        compiled = compile_kernel(one, target)
        used = usage(compiled)
        found[name] = used.registers
        assert used.spilled == 0, (name, used)
        if target == "sm_80":
            code = machine_code(compiled)
            assert "LDG.E.128" in code or "LDG.E.64" in code, name  # no scalar loads
    print(target, dtype, found)
    assert set(found) == set(MOST_REGISTERS)
    assert all(found[name] <= most for name, most in MOST_REGISTERS.items()), found
