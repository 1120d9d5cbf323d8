"""A wheel contains kernels for several processors; the best one that the processor can run is used."""

import dataclasses
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from hypermlp.errors import UserError
from hypermlp.ops import build, native, shipped
from hypermlp.ops.dispatch import BACKENDS

ROOT = Path(__file__).parents[2]
LIBRARIES = {"avx512": ("fma", "avx2", "avx512f"), "avx2": ("fma", "avx2"), "baseline": ()}
ILLEGAL = """
import pytest, torch
from hypermlp.ops import native
native.load()
q = torch.randn(1, 4, 2, 8)
for arguments, message in (((q, q, q.int()), "v is int32"), ((q, q[:, :2], q), "k has shape")):
    with pytest.raises(RuntimeError, match=f"hypermlp: {message}"):
        torch.ops.hypermlp.native(*arguments, *[None] * 9, "relu", "lag", 1e-12)
print("raised")
"""


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """Pretend that the wheel has three libraries; ``installation(flags)`` sets the processor's flags."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for name in ("CXX", "HYPERMLP_CXXFLAGS", "HYPERMLP_ISA"):
        monkeypatch.delenv(name, raising=False)
    entries = []
    for name, needs in LIBRARIES.items():
        (tmp_path / f"{name}.so").write_text(name)
        fields = {"file": f"{name}.so", "instruction_set": name, "needs": needs}
        entries.append(fields | {"sha256": build.digest(name.encode())})
    manifest = {"sources": build.source_digest(), "libraries": entries}
    (tmp_path / shipped.MANIFEST).write_text(json.dumps(manifest))

    def set_flags(*flags: str) -> None:
        monkeypatch.setattr(shipped, "_features", lambda: set(flags))

    return set_flags


@pytest.mark.parametrize(("expected", "flags"), LIBRARIES.items())
def test_the_best_library_for_the_processor(installation, expected, flags):
    installation(*flags, "sse2")
    found = shipped.find()
    assert found is not None
    assert found.instruction_set == expected


def test_the_user_chooses(installation, monkeypatch):
    installation("avx2", "fma")
    monkeypatch.setenv("HYPERMLP_ISA", "baseline")
    assert shipped.find().instruction_set == "baseline"
    monkeypatch.setenv("HYPERMLP_ISA", "avx512")
    with pytest.raises(UserError, match="'avx512', but this processor lacks avx512f"):
        shipped.find()
    monkeypatch.setenv("HYPERMLP_ISA", "sse9")
    with pytest.raises(UserError, match="'sse9'; this installation has avx512, avx2, baseline"):
        shipped.find()


@pytest.mark.parametrize(("name", "value"), [("CXX", "g++"), ("HYPERMLP_CXXFLAGS", "-O1")])
def test_a_compiler_or_flags_of_the_user_mean_a_build(installation, monkeypatch, name, value):
    installation()
    monkeypatch.setenv(name, value)
    assert shipped.find() is None


def test_damaged_or_outdated_libraries_are_not_used(installation, tmp_path):
    installation()
    assert shipped.find() is not None
    (tmp_path / "baseline.so").write_text("damaged")
    with pytest.warns(UserWarning, match=r"baseline\.so is missing or damaged"):
        assert shipped.find() is None
    (tmp_path / "baseline.so").write_text("baseline")
    manifest = json.loads((tmp_path / shipped.MANIFEST).read_text())
    (tmp_path / shipped.MANIFEST).write_text(json.dumps(manifest | {"sources": "other"}))
    with pytest.warns(UserWarning, match="are not those of the kernels"):
        assert shipped.find() is None


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("damaged")])
def test_the_next_best_library_takes_the_place_of_a_damaged_one(installation, tmp_path, damage):
    installation("fma", "avx2", "avx512f")
    damage(tmp_path / "avx512.so")
    with pytest.warns(UserWarning, match=r"avx512\.so is missing or damaged"):
        assert shipped.find().instruction_set == "avx2"


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b"\xff\xfe", b'{"sources": "", "libraries": [3]}'])
def test_a_damaged_manifest_is_passed_over(installation, tmp_path, content):
    installation("fma", "avx2")
    (tmp_path / shipped.MANIFEST).write_bytes(content)
    with pytest.warns(UserWarning, match=r"manifest\.json cannot be read .* install the package again"):
        assert shipped.find() is None


def test_only_sources_count(tmp_path, monkeypatch):
    before = build.source_digest()
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    (tmp_path / "csrc" / "__pycache__").mkdir()
    (tmp_path / "csrc" / ".note").write_text("x")
    assert build.source_digest() == before
    (tmp_path / "csrc" / "gemm.h").write_text("")
    assert build.source_digest() != before


def test_a_source_tree_has_no_libraries(monkeypatch):
    for name in ("CXX", "HYPERMLP_CXXFLAGS", "HYPERMLP_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert shipped.find() is None


def test_the_self_test_passes_inside_any_mode_and_draws_no_random_numbers():
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    state = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert shipped.self_test() is None
    assert torch.equal(torch.get_rng_state(), state)


def wrong_output(run):
    return lambda *given: multiplied(run(*given), 1.001)


def wrong_nan(run):
    return lambda *given: multiplied(run(*given), float("nan"))


def wrong_gradient(run):
    """Multiply the gradient that the kernel is given; results stay as they are."""

    def changed(*given):
        out = run(*given)
        for x in out if isinstance(out, list) else [out]:
            x.register_hook(lambda grad: grad * 1.001)
        return out

    return changed


def multiplied(out, factor):
    return [x * factor for x in out] if isinstance(out, list) else out * factor


MISTAKES = [
    (operation, mistake)
    for operation in ("attention", "convolution", "layer", "step")
    for mistake in (wrong_output, wrong_nan, wrong_gradient)
    if (operation, mistake) != ("step", wrong_gradient)  # a step has no gradient
]
CASES = {"attention": "training", "step": "decoding step"}


@pytest.mark.parametrize(("operation", "mistake"), MISTAKES)
def test_the_self_test_finds_wrong_results(monkeypatch, operation, mistake):
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    right = BACKENDS["native"]
    wrong = dataclasses.replace(right, **{operation: mistake(getattr(right, operation))})
    monkeypatch.setitem(BACKENDS, "native", wrong)
    found = shipped.self_test()
    assert CASES.get(operation, operation) in found
    assert "relative error" in found or "not finite" in found


def test_a_library_that_fails_is_replaced_by_a_build(installation, monkeypatch):
    """It warns once, and the kernels are built as if the wheel had none."""
    if native.unavailable() is not None:
        pytest.skip(f"native is not available: {native.unavailable()}")
    built = build.build(quiet=True)
    installation()
    with pytest.warns(UserWarning, match=r"baseline\.so of this installation fails"):
        assert native.load.__wrapped__() == built


@pytest.fixture(scope="module")
def zig():
    """The command of the cross-compiler."""
    command = shlex.split(os.environ.get("ZIG", ""))
    if not command or shutil.which(command[0]) is None:
        pytest.skip("zig is not installed; `make test-all` installs it")
    return command


@pytest.fixture(scope="module")
def wheel(zig, tmp_path_factory):
    """The wheel for this machine."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the wheel for this machine cannot be tried on another one")
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"HYPERMLP_WHEEL": "linux-x86_64"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = folder.glob("*-py3-none-manylinux_2_28_x86_64.whl")
    return path


@pytest.mark.slow
def test_an_installed_wheel_needs_no_compiler(wheel, tmp_path):
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    environment = {"PYTHONPATH": str(target), "PATH": str(tmp_path / "empty"), "HOME": str(tmp_path)}

    def run(*arguments: str, **extra: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment | extra)
        assert done.returncode == 0, done.stderr
        return done.stdout

    manifest = json.loads((target / "hypermlp/ops/lib" / shipped.MANIFEST).read_text())
    runnable = [x for x in manifest["libraries"] if set(x["needs"]) <= shipped._features()]
    assert "kernels: " + runnable[0]["instruction_set"] in run("-m", "hypermlp", "info")
    for library in runnable:
        assert run("-c", ILLEGAL, HYPERMLP_ISA=library["instruction_set"]) == "raised\n"
    assert not list(tmp_path.rglob(".cache"))
    assert run("-m", "hypermlp", "sample", "tiny", "def ", "--tokens", "20").startswith("def ")
    assert not list(tmp_path.rglob("kernels")), "kernels were built"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["linux-x86_64", "macos-arm64"])
def test_a_library_contains_no_path_of_the_machine_that_built_it(zig, target, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", ("-O1", *(flag for flag in build.FLAGS if flag != "-O3")))
    monkeypatch.syspath_prepend(ROOT)
    hook = importlib.import_module("hatch_build")
    chosen = hook.TARGETS[target]
    library, _ = hook.compile_target(ROOT, chosen._replace(variants=chosen.variants[-1:]), tmp_path)
    content = library.read_bytes()
    paths = {path for path in (ROOT, tmp_path, Path.home(), Path(sys.prefix)) if len(path.parts) > 1}
    assert not [path for path in paths if str(path).encode() in content]
    assert not re.search(rb"/tmp/|\.cache/zig", content)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["driver.cpp", "threads.cpp"])
def test_the_kernels_for_aarch64_run_in_an_emulator(zig, driver, tmp_path):
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("qemu is not installed: apt-get install --no-install-recommends qemu-user")
    sources = [source for source in build.SOURCES.glob("*.cpp") if source.name != "ops.cpp"]
    target = ["-target", "aarch64-linux-musl", "-static", "-mcpu=generic", "-pthread"]
    files = [f"-I{build.SOURCES}", *map(str, (Path(__file__).with_name(driver), *sources))]
    program = str(tmp_path / "program")
    build.run([*zig, "c++", *target, *build.FLAGS, *files, "-o", program])
    assert build.run([emulator, program]) == "ok\n"
