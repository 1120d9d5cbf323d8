"""The test build of the kernels that fills new memory with NaN, and `torch.empty` in the contract's tests."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from hypermlp.ops import build

PROGRAM = """
import sys
from pathlib import Path
import torch
from hypermlp.ops import build, hyper_attention
from hypermlp.testing import op_inputs

build.SOURCES = Path(sys.argv[1])
inputs = op_inputs(queries=9, activation="glu").requires_grad()
out = hyper_attention(*inputs, activation="glu", backend="native")
grads = torch.autograd.grad(out.sum(), inputs.tensors())
print(torch.isfinite(out).all().item(), all(torch.isfinite(x).all() for x in grads))
"""
PLANTED = {  # file, what is removed
    "a tensor": ("backward.cpp", "std::fill_n(sums + key * ld, width, T(0))"),
    "scratch": ("backward.cpp", "sums.clear(rows.group, sums_head)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", [None, *PLANTED])
def test_memory_that_is_not_written_is_found(planted, tmp_path):
    """Without the flag, such memory is often zero and the mistake goes unnoticed."""
    sources = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, sources)
    if planted is not None:
        name, removed = PLANTED[planted]
        text = (sources / name).read_text()
        assert text.count(removed) == 1
        (sources / name).write_text(text.replace(removed, "(void)0"))
    flags = {"HYPERMLP_CXXFLAGS": "-O0 -DHYPERMLP_POISON", "HYPERMLP_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(sources)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(planted is None)], done.stderr


def test_the_contract_fills_the_memory_of_new_tensors(poisoned_memory):
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(3, dtype=torch.bfloat16)).isnan().all()
