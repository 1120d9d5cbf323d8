"""The kernels of the backend "triton", compiled without a GPU: registers, spills, shared memory, vectors.

tests/ops/test_triton.py runs this file in a process of its own, in which nothing is interpreted.
"""

import json
import re

import pytest
import torch
import triton

from hypermlp.ops.triton import resources
from hypermlp.ops.triton.planning import plan
from hypermlp.ops.triton.resources import DTYPES, RANKS, TARGETS, compile_kernel, machine_code, variants

TABLE = json.loads(resources.TABLE.read_text())
ROWS = {(r["target"], r["dtype"], r["rank"], r["kernel"]): r for r in TABLE["kernels"]}
FAST = ("sm_80", "bfloat16", 16)
SETS = [
    pytest.param(target, dtype, rank, marks=() if (target, dtype, rank) == FAST else pytest.mark.slow)
    for target in TARGETS
    for dtype in DTYPES
    for rank in RANKS
]
HOT = {"inner", "inner 2", "activate", "activate_backward", "parameters", "parameters 2"}
ASYNCHRONOUS = r"\bLDGSTS\.E\.BYPASS\.128\b"
SIZES = {"qk_dim": 192, "vo_dim": 384}


@pytest.mark.parametrize(("target", "dtype", "rank"), SETS)
def test_resources_are_those_of_the_table(target, dtype, rank):
    if TABLE["triton"] != triton.__version__:
        pytest.skip(f"the table is Triton {TABLE['triton']}'s, this is {triton.__version__}")
    rows = list(resources.measure((target,), (dtype,), (rank,)))
    assert rows == [row for row in TABLE["kernels"] if (row["target"], row["dtype"], row["rank"]) == (
        target, dtype, rank)]  # fmt: skip


def test_the_table_is_complete_and_within_limits():
    assert len(ROWS) == len(TABLE["kernels"]) >= 15 * len(TARGETS) * len(DTYPES) * len(RANKS)
    for (target, dtype, rank, kernel), row in ROWS.items():
        where = f"{kernel} in {dtype}, rank {rank}, for {target}"
        if target.startswith("sm_"):
            assert row["registers"] < 255, where
        assert row["shared"] <= 48 << 10, where
        if rank == 16 and dtype == "bfloat16":
            assert row["spilled"] == 0, where


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
        {"mixes": "2", "starts": True, "rank": 17, "dtype": torch.float16},
        {"mixes": "", "dtype": torch.float16},
        {"dtype": torch.float64},
    ):
        for queries in (1, 200):
            planned = plan(batch=2, queries=queries, keys=200, **SIZES, **changes)
            seen = set()
            for one in (*planned.forward.launches, *planned.backward.launches):
                if one.kernel is not None and one.name not in seen:
                    seen.add(one.name)
                    compile_kernel(one, target)
