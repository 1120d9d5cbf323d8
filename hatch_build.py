"""Compile the CPU kernels into a wheel. ``make wheels`` uses this; an ordinary build has no kernels inside.

``HYPERMLP_WHEEL`` names the target of ``TARGETS``. The kernels are cross-compiled by zig, which contains a
C++ library and the symbols of old systems. PyTorch's headers are needed, its libraries are not: the kernels
are linked with a stub that has the name and the functions of PyTorch's library.
"""

import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

AVX2 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class Variant(NamedTuple):
    instruction_set: str
    flags: list[str]
    needs: tuple[str, ...] = ()


class Target(NamedTuple):
    tag: str
    triple: str
    suffix: str
    variants: list[Variant]  # the best first


TARGETS = {
    "linux-x86_64": Target(
        "py3-none-manylinux_2_28_x86_64",
        "x86_64-linux-gnu.2.28",
        "so",
        [
            Variant("avx512", ["-mcpu=x86_64_v4", "-mprefer-vector-width=512"], AVX512),
            Variant("avx2", ["-mcpu=x86_64_v3"], AVX2),
            Variant("baseline", ["-mcpu=x86_64"]),
        ],
    ),
    "linux-aarch64": Target(
        "py3-none-manylinux_2_28_aarch64",
        "aarch64-linux-gnu.2.28",
        "so",
        [Variant("neon", ["-mcpu=generic"])],
    ),
    "macos-arm64": Target(
        "py3-none-macosx_11_0_arm64", "aarch64-macos.11.0", "dylib", [Variant("neon", ["-mcpu=apple_m1"])]
    ),
}


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = os.environ.get("HYPERMLP_WHEEL", "")
        if not name or version == "editable":
            return
        if name not in TARGETS:
            raise ValueError(f"HYPERMLP_WHEEL is {name!r}; it must be one of {', '.join(TARGETS)}")
        self.aside = tempfile.TemporaryDirectory()
        folder = Path(self.aside.name)
        build_data["tag"] = TARGETS[name].tag
        build_data["pure_python"] = False
        for file in compile_target(Path(self.root), TARGETS[name], folder):
            build_data["force_include"][str(file)] = f"hypermlp/ops/lib/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "aside"):
            self.aside.cleanup()


def compile_target(root: Path, target: Target, folder: Path) -> list[Path]:
    """Compile all libraries of a target and return their paths and the manifest's."""
    sys.path.insert(0, str(root))
    import torch

    from hypermlp.ops import build, shipped

    headers = Path(torch.__file__).parent / "include"
    zig = shlex.split(os.environ.get("ZIG", "")) or [sys.executable, "-m", "ziglang"]
    (folder / "exports.map").write_text("{ global: hypermlp_*; local: *; };")
    _write_stub(zig, target, headers, folder)
    files, entries = [], []
    for variant in target.variants:
        library = folder / f"kernels-{variant.instruction_set}.{target.suffix}"
        link = [f"-L{folder}", "-ltorch_cpu", "-Wl,-s"]  # stripped: symbols for debuggers contain paths
        if target.suffix == "so":
            link += ["-Wl,-z,defs", f"-Wl,--version-script={folder / 'exports.map'}"]
        else:  # zig has no list of exports for macOS
            link.append(f"-Wl,-install_name,@rpath/{library.name}")
        paths = [f"-ffile-prefix-map={path}=." for path in (build.SOURCES, headers)]
        command = [*zig, "c++", "-target", target.triple, *variant.flags, *build.FLAGS, *paths]
        build.compile_library(command, link, library)
        sha256 = build.digest(library.read_bytes())
        entry = shipped.Library(library.name, variant.instruction_set, variant.needs, sha256)
        entries.append(entry.__dict__)
        files.append(library)
    manifest = folder / shipped.MANIFEST
    manifest.write_text(json.dumps({"sources": build.source_digest(), "libraries": entries}, indent=1))
    return [*files, manifest]


def _write_stub(zig: list[str], target: Target, headers: Path, folder: Path) -> None:
    """Write a library with the name and the C functions of PyTorch's, for the linker."""
    from hypermlp.ops import build

    texts = [
        (headers / "torch/csrc" / name).read_text()
        for name in ("inductor/aoti_torch/c/shim.h", "stable/c/shim.h")
    ]
    names = sorted(set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", "\n".join(texts))))
    source = folder / "stub.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    name = f"libtorch_cpu.{target.suffix}"
    named = f"-Wl,-soname,{name}" if target.suffix == "so" else f"-Wl,-install_name,@rpath/{name}"
    build.run([*zig, "cc", "-target", target.triple, "-shared", named, str(source), "-o", str(folder / name)])
