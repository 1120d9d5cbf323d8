"""``hypermlp gpu-check`` in Triton's interpreter, in processes of its own, and what needs no kernels."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hypermlp
from hypermlp.bench import gpu
from hypermlp.cli import main
from hypermlp.ops import contract, triton
from hypermlp.reporting.records import new_record, read_record, write_record

pytest.importorskip("triton")
PACKAGE = Path(hypermlp.__file__).parent
CHECK = {"what": "check", "contender": "triton", "dtype": "float32", "cases": 2, "worst_error": 1e-7}
TIMING = {"what": "decode", "contender": "SDPA", "dtype": "bfloat16", "batch": 1, "length": 9, "hidden": 64}


def run(place, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(place)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "hypermlp", "gpu-check", "--interpret", *arguments]
    # `python -m` looks into the working directory first.
    return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_in_the_interpreter(tmp_path):
    path = tmp_path / "gpu.json"
    done = run(PACKAGE.parent, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "their times mean nothing" in done.stdout
    assert "5 of 5 cases" in done.stdout
    rows = read_record(path, "gpu-check")["results"]
    assert {row["what"] for row in rows} == {"check", *gpu.PASSES}
    assert all(row["ms"] > 0 for row in rows if row["what"] != "check")


@pytest.mark.slow
def test_a_mistake_in_a_kernel_is_named(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "hypermlp")
    file = tmp_path / "hypermlp/ops/triton/kernels.py"
    right, wrong = "squares += tl.sum(h * h, 1)", "squares += tl.sum(h * h, 1) * 1.01"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    done = run(tmp_path, "--check-only", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert "glu, mixes 12, layout lag, all, training, float32: output" in done.stderr
    assert read_record(tmp_path / "gpu.json")["results"][0]["failed"]


def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu-check", "--json", str(tmp_path / "x.json")]) == 2
    assert "no CUDA or ROCm device; --interpret runs" in capsys.readouterr().err


def test_failing_cases_exit_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(gpu, "run_checks", lambda *_: [CHECK | {"failed": ["glu, decode: output is wrong"]}])
    with pytest.raises(SystemExit) as stop:
        main(["gpu-check", "--interpret", "--json", str(tmp_path / "x.json")])
    assert stop.value.code == 1
    assert "1 failed: glu, decode: output is wrong" in capsys.readouterr().err


def test_a_case_that_fails_is_a_row(monkeypatch):
    def check(case, *_given, **_options):
        if "decode" in case.name:
            raise AssertionError("output: wrong\nmore")
        return 1e-7

    monkeypatch.setattr(contract, "check", check)
    rows = gpu.run_checks("cpu", lambda text: None)
    assert [(row["dtype"], len(row["failed"])) for row in rows] == [("float32", 1), ("bfloat16", 1)]
    assert rows[0]["failed"] == ["glu, mixes 12, layout lag, all, decode, float32: output: wrong"]


def test_the_report_shows_a_record(tmp_path, capsys):
    rows = [CHECK | {"failed": []}, TIMING | {"ms": 1.5, "mib": 2.0}, TIMING | {"reason": "out of memory"}]
    write_record(tmp_path / "gpu.json", new_record("gpu-check", {"device": "Fake GPU"}, rows))
    assert main(["report", str(tmp_path / "gpu.json"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for text in ("The Triton kernels on a GPU", "2 of 2 cases", "1.500 ms, 2.0 MiB", "out of memory", "Fake"):
        assert text in page
    assert "left out" not in capsys.readouterr().err
    assert json.loads((tmp_path / "gpu.json").read_text())["kind"] == "gpu-check"


@pytest.mark.parametrize("what", gpu.PASSES)
def test_contenders_that_need_no_kernels(what):
    contenders = tuple(c for c in gpu.CONTENDERS if c.backend in ("blocked", "sdpa", "flash_attn"))
    rows = gpu.run_timings("cpu", [(1, 5, 64)], contenders, rounds=1, seconds=1.0, progress=lambda text: None)
    mine = [row for row in rows if row["what"] == what]
    assert {row["contender"] for row in mine} >= {"blocked", "SDPA", "blocked, float32", "blocked, TF32"}
    assert all(row.get("ms", 0) > 0 for row in mine)
    assert torch.get_float32_matmul_precision() == "highest"
