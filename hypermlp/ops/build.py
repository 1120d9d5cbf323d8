"""Builds the C++ kernels once, on first use, and keeps them in the user's cache.

Nothing is compiled at install or import. The library is named by a hash of what it depends on: sources,
flags, torch, processor. It is built aside and renamed, so a half-written one is never loaded; a lock lets
processes that start together build once, and a process that waits too long for it builds on its own. A
compiler is needed only to build.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")
TORCH_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10, the oldest that we take
LOCK_SECONDS = 120.0


class BuildError(RuntimeError):
    """Why there is no library."""


def cache_directory() -> Path:
    """``HYPERMLP_CACHE``, or a folder in the user's cache."""
    if chosen := os.environ.get("HYPERMLP_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hypermlp"
    except RuntimeError as error:
        raise BuildError(f"there is no cache folder: {error}; name one in HYPERMLP_CACHE") from error


def compiler() -> list[str]:
    """``CXX``, which may have arguments, or the first compiler found."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in candidates:
        program, *arguments = shlex.split(name)
        if path := shutil.which(program):
            return [path, *arguments]
    raise BuildError(f"no C++ compiler found (tried {', '.join(candidates)}); install one, or name it in CXX")


def extra_flags() -> tuple[str, ...]:
    """``HYPERMLP_CXXFLAGS``, for instance for a sanitizer."""
    return tuple(os.environ.get("HYPERMLP_CXXFLAGS", "").split())


def _torch_flags() -> list[str]:
    """Where the installed PyTorch has its headers and the library that the process has loaded already."""
    folder = Path(torch.__file__).parent
    return [TORCH_ABI, f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]


def library_path() -> Path:
    """Where the library of these sources, this torch and this processor is, or will be.

    One that is there needs no compiler.
    """
    key = hashlib.sha256(
        "\0".join((torch.__version__, _processor(), *FLAGS, TORCH_ABI, *extra_flags())).encode()
    )
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_directory() / f"kernels-{key.hexdigest()[:16]}.so"


def _processor() -> str:
    """What -march=native sees."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def build(*, quiet: bool = False) -> Path:
    """The library, built if it is not there yet. Raises BuildError with the reason."""
    path = library_path()
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not _is_whole(path):
                _compile(path, quiet=quiet)
    except OSError as error:
        raise BuildError(
            f"cannot write to the cache {path.parent}: {error}; name another folder in HYPERMLP_CACHE"
        ) from error
    return path


def _compile(path: Path, *, quiet: bool) -> None:
    if not quiet:
        print(
            f"hypermlp: building the CPU kernels in {path.parent}, once, about 10 s",
            file=sys.stderr,
            flush=True,
        )
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=path.parent, suffix=".part") as aside,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(aside) / source.with_suffix(".o").name) for source in sources]
        common = [*compiler(), *FLAGS, *extra_flags(), *_torch_flags()]
        for done in [
            threads.submit(_run, [*common, "-c", str(s), "-o", o])
            for s, o in zip(sources, objects, strict=True)
        ]:
            done.result()
        library = Path(aside) / path.name
        _run([*common, "-shared", *objects, "-ltorch_cpu", "-o", str(library)])
        with open(library, "rb") as file:
            os.fsync(file.fileno())
        digest = _digest(library)
        os.replace(library, path)
        path.with_suffix(".sha256").write_text(digest)
    if not quiet:
        print(f"hypermlp: built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    """Is the library there, as it was written? A damaged one would not fail to load but kill the process."""
    checksum = path.with_suffix(".sha256")
    return path.exists() and checksum.exists() and checksum.read_text() == _digest(path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired as error:
        raise BuildError("the C++ compiler took more than 600 s") from error
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[
            -1:
        ]
        raise BuildError(
            f"the C++ compiler failed: {' '.join(lines[:1]).strip()}; the command was {' '.join(command)}"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file, or give up waiting after LOCK_SECONDS:

    building twice is harmless, hanging is not.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(path, "w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        yield
