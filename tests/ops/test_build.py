"""How users get the native kernels: built once on first use, and never in the way."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hypermlp.cli import main
from hypermlp.ops import build, native

ROOT = Path(__file__).parents[2]
USE = "import torch; from hypermlp import HyperGLU; print(HyperGLU(16, 8)(torch.randn(1, 8, 16)).shape)"


FAST = "-O0"  # where it does not matter what is built


def run(code: str = USE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )


def start(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USE], stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def test_nothing_is_built_by_an_import(tmp_path):
    done = run("import hypermlp, hypermlp.ops, hypermlp.layers", HYPERMLP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0
    assert not (tmp_path / "cache").exists()


def test_processes_that_start_together_build_once(tmp_path):
    together = [start(HYPERMLP_CACHE=str(tmp_path), HYPERMLP_CXXFLAGS=FAST) for _ in range(2)]
    messages = "".join(process.communicate(timeout=120)[1] for process in together)
    assert [process.returncode for process in together] == [0, 0], messages
    assert messages.count("hypermlp: built in") == 1
    assert len(list(tmp_path.glob("*.so"))) == 1
    assert not list(tmp_path.glob("*.part"))
    again = run(HYPERMLP_CACHE=str(tmp_path), HYPERMLP_CXXFLAGS=FAST)
    assert "building" not in again.stderr


def test_without_a_compiler_it_falls_back_with_one_warning(tmp_path):
    done = run(
        USE.replace("print", "HyperGLU(16, 8)(torch.randn(1, 8, 16)); print"),
        HYPERMLP_CACHE=str(tmp_path),
        CXX="no-such-compiler",
    )
    assert done.returncode == 0
    assert "torch.Size([1, 8, 16])" in done.stdout
    assert (
        done.stderr.count("backend 'native' passed over: no C++ compiler found (tried no-such-compiler)") == 1
    )


def test_a_failing_compiler_falls_back_with_its_message(tmp_path):
    done = run(HYPERMLP_CACHE=str(tmp_path), HYPERMLP_CXXFLAGS="--no-such-flag")
    assert done.returncode == 0
    assert "the C++ compiler failed" in done.stderr
    assert not list(tmp_path.glob("*.so"))


def test_an_unwritable_cache_falls_back(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(HYPERMLP_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 0
    assert "cannot write to the cache" in done.stderr


def test_a_forced_backend_is_used_or_refused(tmp_path):
    environment = {"HYPERMLP_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    assert run(HYPERMLP_BACKEND="blocked", **environment).stderr == ""
    refused = run(HYPERMLP_BACKEND="native", **environment)
    assert refused.returncode != 0
    assert "ValueError: backend 'native' is not available: no C++ compiler found" in refused.stderr


def test_a_damaged_library_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    monkeypatch.setenv("HYPERMLP_CXXFLAGS", FAST)
    path = build.build(quiet=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    assert build.build(quiet=True).stat().st_size > 2000


def test_a_compiler_that_cannot_run_falls_back(tmp_path):
    nonsense = tmp_path / "cxx"
    nonsense.write_bytes(b"\x7fELF nonsense")
    nonsense.chmod(0o755)
    done = run(HYPERMLP_CACHE=str(tmp_path / "cache"), CXX=str(nonsense))
    assert done.returncode == 0
    assert "cannot be run" in done.stderr


def test_without_a_home_the_cache_is_named_or_missed(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HYPERMLP_CACHE", raising=False)
    with pytest.raises(build.BuildError, match="HYPERMLP_CACHE"):
        build.library_path()
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    assert build.library_path().parent == tmp_path


def test_the_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "c++ -pipe")
    assert build.compiler()[1:] == ["-pipe"]


def test_a_lock_that_nobody_gives_back_times_out(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    monkeypatch.setenv("HYPERMLP_CXXFLAGS", FAST)
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.3)
    with open(build.library_path().with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.build(quiet=True).exists()


def test_the_command_builds_and_reports(tmp_path, monkeypatch, capsys):
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    assert main(["build"]) == 0
    assert "backend 'native' is available" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build"]) == 0  # what is built needs no compiler
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    assert main(["build"]) == 2
    assert "no C++ compiler found" in capsys.readouterr().err


def test_a_wheel_carries_the_sources(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"hypermlp/ops/csrc/{source.name}" for source in build.SOURCES.iterdir()} <= names
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
    )
    done = run(
        f"import sys; sys.path.insert(0, {str(target)!r}); import hypermlp; print(hypermlp.__file__); {USE}",
        HYPERMLP_CACHE=str(tmp_path),
    )
    assert str(target) in done.stdout
    assert "hypermlp: built in" in done.stderr
