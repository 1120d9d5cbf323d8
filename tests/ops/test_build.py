"""The native kernels are built once, on first use; where that fails, another backend is used."""

import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hypermlp.cli import main
from hypermlp.ops import build, native

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
DRIVERS = [Path(__file__).with_name(name) for name in ("driver.cpp", "threads.cpp")]
USE = "import torch; from hypermlp import HyperGLU; print(HyperGLU(16, 8)(torch.randn(1, 8, 16)).shape)"
FAST = "-O0"  # for tests that only need some library
# clang warns where a loop of float64 cannot be vectorised, which is no defect of the source.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-pass-failed")
CHECK = """
import torch
from hypermlp import HyperGLU
from hypermlp.ops import hyper_attention
from hypermlp.testing import assert_close, op_inputs

for activation in ("relu", "glu"):
    for layout in ("lag", "forward"):
        inputs = op_inputs(queries=40, keys=45, activation=activation).requires_grad()
        results = []
        for backend in ("native", "reference"):
            out = hyper_attention(*inputs, activation=activation, layout=layout, backend=backend)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs.tensors())])
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected, tolerance=1e-10)
layer, x = HyperGLU(16, 8).double(), torch.randn(2, 8, 16, dtype=torch.float64)
layer.backend = "native"
with torch.no_grad():
    state = layer.new_state(2)
    steps = torch.cat([layer(x[:, i : i + 1], state=state) for i in range(8)], dim=1)
    assert_close(steps, layer(x), tolerance=1e-10)
print("checked")
"""


def run(code: str = USE, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(code, **environment)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


@pytest.fixture(params=["g++", "clang++"])
def real_compiler(request):
    """A compiler that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed: apt-get install --no-install-recommends g++ clang")
    return request.param


@pytest.fixture
def write_compiler(tmp_path, monkeypatch):
    """``write_compiler(version)`` sets CXX to a program that writes its version instead of a library."""
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path / "cache"))

    def write(version: str, *arguments: str) -> None:
        program = tmp_path / "fake-c++"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *--version*) echo "fake {version}"; exit;; esac\n'
            f'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo "library {version}" > "$2"; shift; done\n'
        )
        program.chmod(0o755)
        build._compiler_identity.cache_clear()
        monkeypatch.setenv("CXX", " ".join((str(program), *arguments)))

    yield write
    build._compiler_identity.cache_clear()


def test_nothing_is_built_by_an_import(tmp_path):
    done = run("import hypermlp, hypermlp.ops, hypermlp.layers", HYPERMLP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0
    assert not (tmp_path / "cache").exists()


def test_processes_that_start_together_build_once_and_without_warnings(real_compiler, tmp_path):
    environment = {"HYPERMLP_CACHE": str(tmp_path), "HYPERMLP_CXXFLAGS": " ".join(("-O1", *WARNINGS))}
    together = [start(CHECK, CXX=real_compiler, **environment) for _ in range(2)]
    outputs, messages = zip(*(process.communicate(timeout=300) for process in together), strict=True)
    assert outputs == ("checked\n", "checked\n"), messages
    assert "".join(messages).count("hypermlp: built in") == 1
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 1
    assert not list((tmp_path / "kernels").glob("*.part"))
    without_compiler = run(CHECK, CXX="no-such-compiler", **environment)
    assert (without_compiler.stdout, without_compiler.stderr) == ("checked\n", "")


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.stem)
def test_a_cpp_program_drives_the_kernels_without_torch(real_compiler, driver, tmp_path):
    sources = [source for source in build.SOURCES.glob("*.cpp") if source.name != "ops.cpp"]
    flags = ["-std=c++17", "-O1", "-march=native", "-fopenmp-simd", "-pthread", *WARNINGS]
    program = tmp_path / "driver"
    command = [real_compiler, *flags, f"-I{build.SOURCES}", *map(str, (driver, *sources)), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stdout + done.stderr


def test_the_limit_of_the_scratch_memory():
    """Above the limit, nothing is kept between calls."""
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    code = """
import ctypes, torch
from hypermlp.ops import hyper_attention, native
from hypermlp.testing import op_inputs
inputs = op_inputs(queries=600, qk_dim=32, vo_dim=64, dtype=torch.float32)
hyper_attention(*inputs, backend="native")
library = ctypes.CDLL(str(native.load()))
library.hypermlp_scratch_held.restype = ctypes.c_int64
print(library.hypermlp_scratch_held(), native.scratch_peak() > 2**20)
"""
    assert run(code, HYPERMLP_SCRATCH_MB="0").stdout == "0 True\n"
    kept, _ = run(code, HYPERMLP_SCRATCH_MB="100").stdout.split()
    assert int(kept) > 2**20
    refused = run(code, HYPERMLP_SCRATCH_MB="-1")
    assert "HYPERMLP_SCRATCH_MB is '-1'; it must be a whole number" in refused.stderr


def test_no_openmp_runtime_is_linked():
    """PyTorch brings its own threads; a second runtime beside them would cost speed, or abort."""
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    for source in build.SOURCES.iterdir():
        assert "#pragma omp parallel" not in source.read_text(), source
    names = subprocess.run(["nm", "-D", str(build.library_path())], capture_output=True, text=True).stdout
    assert "aoti_torch" in names
    assert not re.search(r"GOMP|__kmpc|omp_", names)


def test_only_the_boundary_includes_torch():
    texts = {source.name: source.read_text() for source in build.SOURCES.iterdir()}
    includes = {name for name, text in texts.items() if "#include <torch" in text}
    assert includes == {"guard.h", "tensors.h"}
    users = {name for name, text in texts.items() if re.search('#include "(guard|tensors).h"', text)}
    assert users == {"ops.cpp", "attention_ops.h", "layer_ops.h"}
    assert {name for name, text in texts.items() if '#include "layer_ops.h"' in text} == {"ops.cpp"}


def test_no_exception_leaves_the_library():
    """A wheel's library has its own C++ runtime: an exception that leaves it would end the process."""
    registered = re.findall(r"m\.impl\(.*\);", (build.SOURCES / "ops.cpp").read_text())
    assert registered
    assert all("hypermlp::guarded<TORCH_BOX(" in line for line in registered), registered


def test_the_cpp_sources_are_formatted():
    sources = [*sorted(build.SOURCES.iterdir()), *DRIVERS, DRIVERS[0].with_name("workers.h")]
    for source in sources:
        assert max(map(len, source.read_text().splitlines())) <= 110, source
    program = shutil.which("clang-format")
    if program is None:
        pytest.skip("clang-format is not installed: apt-get install --no-install-recommends clang-format")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    if not re.search(r"version 14\.", version):
        pytest.skip(f"the sources are formatted by clang-format 14; here is {version.strip()}")
    command = [program, "--dry-run", "--Werror", f"--style=file:{ROOT / '.clang-format'}", *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_compiler_builds_another_library(write_compiler):
    write_compiler("1")
    first = build.build(quiet=True)
    assert first.read_text() == "library 1\n"
    assert build.library_path() == first
    write_compiler("2")
    second = build.build(quiet=True)
    assert second.read_text() == "library 2\n"
    write_compiler("2", "-pipe")
    third = build.build(quiet=True)
    assert len({first, second, third}) == 3
    write_compiler("1")
    assert build.library_path() == first


def test_the_compiler_path_is_part_of_the_key(write_compiler, tmp_path, monkeypatch):
    write_compiler("1")
    first = build.library_path()
    copy = shutil.copy(os.environ["CXX"], tmp_path / "other-c++")
    monkeypatch.setenv("CXX", str(copy))
    assert build.library_path() != first


def test_without_a_compiler_the_newest_whole_library_is_taken(write_compiler, monkeypatch):
    paths = []
    for age, version in enumerate(("1", "2", "3")):
        write_compiler(version)
        paths.append(build.build(quiet=True))
        os.utime(paths[-1], (1000 + age, 1000 + age))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build(quiet=True) == paths[2]
    paths[2].write_text("damaged")
    assert build.build(quiet=True) == paths[1]
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
        build.build(quiet=True, force=True)
    assert paths[1].read_text() == "library 2\n"
    monkeypatch.setenv("HYPERMLP_CXXFLAGS", "-DOTHER")  # none of them fits
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
        build.build(quiet=True)


def test_a_damaged_library_is_built_again(write_compiler):
    write_compiler("1")
    path = build.build(quiet=True)
    path.write_text("lib")
    assert build.build(quiet=True).read_text() == "library 1\n"


def test_a_lock_that_is_never_released_times_out(write_compiler, monkeypatch, capfd):
    fcntl = pytest.importorskip("fcntl")
    write_compiler("1")
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.3)
    lock = build.library_path().with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.build().exists()
    assert capfd.readouterr().err.count("waiting for another process, which builds the CPU kernels") == 1


def test_two_builds_at_once_do_not_disturb_each_other(write_compiler, monkeypatch):
    """On a loaded machine a build may take longer than another process waits for it."""
    write_compiler("1")
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.0)
    compile_library, both = build.compile_library, threading.Barrier(2, timeout=60)

    def slowly(*arguments):
        both.wait()
        compile_library(*arguments)
        both.wait()

    monkeypatch.setattr(build, "compile_library", slowly)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: build.build(quiet=True), range(2))
    assert first == second
    assert build._is_whole(first)
    assert not list(first.parent.glob("*.part"))


def test_without_a_compiler_it_falls_back_with_one_warning(tmp_path):
    done = run(
        USE.replace("print", "HyperGLU(16, 8)(torch.randn(1, 8, 16)); print"),
        HYPERMLP_CACHE=str(tmp_path),
        CXX="no-such-compiler",
    )
    assert done.returncode == 0
    assert "torch.Size([1, 8, 16])" in done.stdout
    assert (
        done.stderr.count("backend 'native' is not available: no C++ compiler found (tried no-such-compiler)")
        == 1
    )


def test_a_failing_compiler_falls_back_with_its_message(tmp_path):
    done = run(HYPERMLP_CACHE=str(tmp_path), HYPERMLP_CXXFLAGS="--no-such-flag")
    assert done.returncode == 0
    assert "the C++ compiler failed" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_that_cannot_run_falls_back(tmp_path):
    nonsense = tmp_path / "cxx"
    nonsense.write_bytes(b"\x7fELF nonsense")
    nonsense.chmod(0o755)
    done = run(HYPERMLP_CACHE=str(tmp_path / "cache"), CXX=str(nonsense))
    assert done.returncode == 0
    assert "cannot be run" in done.stderr


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
    assert "backend 'native' is not available: no C++ compiler found" in refused.stderr


def test_without_a_home_the_cache_must_be_named(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HYPERMLP_CACHE", raising=False)
    with pytest.raises(build.BuildError, match="HYPERMLP_CACHE"):
        build.library_path()
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    assert build.library_path().parent == tmp_path / "kernels"


def test_the_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "c++ -pipe")
    assert build.compiler()[1:] == ["-pipe"]


def test_the_command_builds_and_reports(tmp_path, monkeypatch, capsys):
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    assert main(["build"]) == 0
    assert "backend 'native' is available" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["build"]) == 0  # an existing library needs no compiler
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    assert main(["build"]) == 2
    assert "no C++ compiler found" in capsys.readouterr().err


def test_the_command_can_build_again(write_compiler, capsys):
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    write_compiler("1")
    states = [(["build"], "built in"), (["build"], "it existed"), (["build", "--force"], "built in")]
    for arguments, state in states:
        assert main(arguments) == 0
        assert state in capsys.readouterr().out


def test_a_wheel_carries_the_sources(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"hypermlp/ops/csrc/{source.name}" for source in build.SOURCES.iterdir()} <= names
    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)], check=True)
    done = run(
        f"import sys; sys.path.insert(0, {str(target)!r}); import hypermlp; print(hypermlp.__file__); {USE}",
        HYPERMLP_CACHE=str(tmp_path),
        HYPERMLP_CXXFLAGS=FAST,
    )
    assert str(target) in done.stdout
    assert "hypermlp: built in" in done.stderr
