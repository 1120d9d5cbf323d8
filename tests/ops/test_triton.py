"""The backend "triton" on a machine without a GPU.

Its kernels run in Triton's interpreter and are compiled for GPUs in processes of their own, because the
interpreter holds for a whole process. What needs neither is tested here.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hypermlp.ops import available_backends, hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS, choose_backend
from hypermlp.ops.triton import selfcheck, unavailable
from hypermlp.testing import op_inputs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
ON_GPU = Request("attention", "cuda", torch.bfloat16, "glu", mixed=True)
NAMED_GPUS = {"A100": 40 << 20, "H100": 50 << 20, "B200": 126 << 20}  # bytes of their level-2 caches
PAPER = {"heads": 2, "qk_dim": 192, "vo_dim": 384}  # D = 768, two heads

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton"
)


def check_alone(file, marker, *options, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, *options]
    done = subprocess.run(
        [*command, str(HERE / file)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1] or "[100%]" in done.stdout


INTERPRETED = {"TRITON_INTERPRET": "1"}
ALONE = {
    "contract": ("test_contract.py", ("-k", "triton"), INTERPRETED),
    "interpreted": ("triton_interpreted.py", (), INTERPRETED),
    "kernels": ("triton_kernels.py", (), INTERPRETED),
    "elementwise": ("triton_elementwise.py", (), INTERPRETED),
    "compiled": ("triton_compiled.py", (), {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}),
}


@needs_triton
@pytest.mark.parametrize("part", ALONE)
@pytest.mark.parametrize(
    "marker",
    [pytest.param("not slow", marks=pytest.mark.thorough), pytest.param("slow", marks=pytest.mark.slow)],
)
def test_in_a_process_of_its_own(part, marker):
    file, options, environment = ALONE[part]
    check_alone(file, marker, *options, **environment)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the choice of a backend can see."""
    monkeypatch.delenv("HYPERMLP_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selfcheck, "distrusted", lambda: None)  # tests/ops/test_triton_selfcheck.py has it


@needs_triton
def test_auto_takes_it_on_a_gpu(gpu):
    assert unavailable() is None
    assert choose_backend("auto", ON_GPU).name == "triton"
    assert choose_backend("auto", ON_GPU._replace(activation="softmax", mixed=False)).name == "sdpa"
    assert choose_backend("auto", ON_GPU._replace(activation="softmax")).name == "blocked"


def test_without_triton_auto_takes_blocked_and_says_why(gpu, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unavailable() == "Triton is not installed; `pip install triton`"
    with pytest.warns(UserWarning, match="backend 'triton' is not available: Triton is not installed"):
        assert choose_backend("auto", ON_GPU).name == "blocked"


@needs_triton
def test_without_a_gpu_it_is_refused_with_a_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA or ROCm device; set TRITON_INTERPRET=1" in unavailable()
    assert "triton" not in available_backends()
    with pytest.raises(ValueError, match="backend 'triton' is not available: it runs on CUDA and ROCm"):
        hyper_attention(*op_inputs(), backend="triton")


@needs_triton
def test_auto_never_takes_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = Request("attention", "cpu", torch.float32, "glu", mixed=True)
    assert BACKENDS["triton"].refusal(request) is None
    assert "triton" in available_backends()
    assert not BACKENDS["triton"].automatic(request)
    assert choose_backend("auto", request).name in ("native", "blocked")


def plan(**sizes):
    """Return what a call launches; Triton may not be installed."""
    from triton_launches import plan

    return plan(**sizes)


@needs_triton
def test_long_sequences_have_many_programs():
    """Row kernels are split over slots: a batch of one still fills a GPU, once a quarter of the work is done.

    ``finish`` needs no split; its programs have two warps.
    """
    planned = plan(batch=1, queries=8192, **PAPER)
    for one, name, least in (
        (planned.forward, "inner", 1500),
        (planned.forward, "activate", 1500),
        (planned.forward, "finish", 1000),
        (planned.backward, "inner", 1500),
        (planned.backward, "activate_backward", 1500),
    ):
        programs = one.programs(name)
        assert min(programs[len(programs) // 4 :]) > least, name


@needs_triton
@pytest.mark.parametrize("name", NAMED_GPUS)
def test_chunks_fit_the_cache(name):
    for batch, length in ((8, 1024), (1, 4096)):
        planned = plan(batch=batch, queries=length, **PAPER, l2_bytes=NAMED_GPUS[name])
        assert planned.forward.scratch_bytes <= NAMED_GPUS[name]
        assert planned.backward.scratch_bytes <= NAMED_GPUS[name]


@needs_triton
def test_memory_is_linear():
    """Eight times the positions need at most about eight times the scratch: no matrix of all scores."""
    short, long = (plan(batch=1, queries=t, **PAPER).backward.scratch_bytes for t in (8192, 65536))
    assert long <= 9 * short


@needs_triton
def test_nothing_waits_for_the_device():
    """A plan has tensors without contents: a value that is read on the host raises. Decoding: 4 launches."""
    for layout in ("lag", "forward"):
        planned = plan(batch=2, queries=300, **PAPER, layout=layout, starts=True)
        assert planned.backward.total > 10
    step = plan(batch=2, queries=1, keys=4096, **PAPER, starts=True).forward
    assert [one.name for one in step.launches] == [
        "decode_scores",
        "decode_activate",
        "decode_readout",
        "collect",
    ]
    assert step.other == 0
    assert all(one.programs >= 256 for one in step.launches[:3])


@needs_triton
def test_float32_products_follow_the_users_precision():
    def precisions():
        launches = plan(batch=1, queries=64, **PAPER, dtype=torch.float32).forward.launches
        return {one.arguments["PRECISION"] for one in launches if "PRECISION" in one.arguments}

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert precisions() == {"ieee"}
        torch.set_float32_matmul_precision("high")
        assert precisions() == {"tf32"}
    finally:
        torch.set_float32_matmul_precision(before)
