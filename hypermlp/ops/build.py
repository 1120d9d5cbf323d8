"""Build the C++ kernels once, on first use, and keep them in the user's cache.

A wheel may contain built kernels (ops/shipped.py). Otherwise nothing is compiled at install or import. The
name of the library contains a hash of the sources, the flags, PyTorch and the processor, and a hash of the
compiler. The library is built aside and renamed, so that a half-written one is never loaded. A lock lets
processes that start together build once; a process that waits too long for the lock builds on its own.
"""

import contextlib
import functools
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

from hypermlp.cache import cache_directory, require_private
from hypermlp.errors import UserError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
)
THIS_PROCESSOR = "-march=native"
TORCH_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10, the oldest supported version
LOCK_SECONDS = 600.0


class BuildError(UserError):
    """The kernels cannot be built; the message says why."""


def compiler() -> list[str]:
    """Return the command of the C++ compiler: ``CXX``, which may have arguments, or the first one found."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in candidates:
        program, *arguments = shlex.split(name)
        if path := shutil.which(program):
            return [path, *arguments]
    raise BuildError(f"no C++ compiler found (tried {', '.join(candidates)}); install one, or name it in CXX")


def extra_flags() -> tuple[str, ...]:
    """Return the flags in ``HYPERMLP_CXXFLAGS``, for instance for a sanitizer."""
    return tuple(os.environ.get("HYPERMLP_CXXFLAGS", "").split())


def library_path() -> Path:
    """Return the path of the library for these sources, flags, PyTorch, processor and compiler.

    The library need not exist yet. Without a compiler, return the newest existing library that fits all the
    rest: only building needs a compiler. Raise BuildError if there is neither.
    """
    try:
        folder = cache_directory() / "kernels"
        require_private(folder, "code")
    except UserError as error:
        raise BuildError(str(error)) from error
    settings = [torch.__version__, _processor(), *flags(), TORCH_ABI, source_digest()]
    stem = f"kernels-{digest(*(setting.encode() for setting in settings)):.12}"
    try:
        return folder / f"{stem}-{digest(_compiler_identity(*compiler()).encode()):.12}.so"
    except BuildError:
        existing = [path for path in folder.glob(f"{stem}-*.so") if _is_whole(path)]
        if not existing:
            raise
        return max(existing, key=lambda path: path.stat().st_mtime)


def build(*, quiet: bool = False, force: bool = False) -> Path:
    """Return the path of the library; build it if it does not exist yet, or if ``force`` is set.

    Raise BuildError with the reason if that fails.
    """
    path = library_path()
    if not force and _is_whole(path):
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock"), quiet=quiet):
            if force or not _is_whole(path):
                _compile(path, quiet=quiet)
    except OSError as error:
        raise BuildError(
            f"cannot write to the cache {path.parent}: {error}; name another folder in HYPERMLP_CACHE"
        ) from error
    return path


def compile_library(command: list[str], link: list[str], library: Path) -> None:
    """Compile the sources next to the library and link them.

    ``command``: the compiler with its flags; ``link``: the further arguments of the linker.
    """
    headers = [TORCH_ABI, "-isystem", str(Path(torch.__file__).parent / "include")]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(library.with_name(f"{library.stem}-{source.stem}.o")) for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        jobs = [
            threads.submit(run, [*command, *headers, "-c", str(source), "-o", target])
            for source, target in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    run([*command, "-shared", *objects, *link, "-o", str(library)])


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def source_digest() -> str:
    """Return a hash of the C++ sources."""
    sources = sorted(source for source in SOURCES.iterdir() if source.suffix in (".cpp", ".h"))
    return digest(*(f"{source.name}\0".encode() + source.read_bytes() for source in sources))


def flags() -> tuple[str, ...]:
    """Return all flags of a build for this processor."""
    return *FLAGS, THIS_PROCESSOR, *extra_flags()


@functools.cache
def _compiler_identity(program: str, *arguments: str) -> str:
    """Return a text that differs between compilers: resolved path, arguments and version."""
    version = run([program, *arguments, "--version"], env=os.environ | {"LC_ALL": "C"})
    return "\0".join((str(Path(program).resolve()), *arguments, version))


def _processor() -> str:
    """Return a description of everything that ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(path: Path, *, quiet: bool) -> None:
    if not quiet:
        _report(f"building the CPU kernels in {path.parent}, once, about half a minute")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".part") as aside:
        library = Path(aside) / path.name
        link = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
        compile_library([*compiler(), *flags()], link, library)
        with open(library, "rb") as file:
            os.fsync(file.fileno())
            checksum = digest(file.read())
        os.replace(library, path)
        path.with_suffix(".sha256").write_text(checksum)
    if not quiet:
        _report(f"built in {time.monotonic() - began:.0f} s")


def _report(text: str) -> None:
    print(f"hypermlp: {text}", file=sys.stderr, flush=True)


def _is_whole(path: Path) -> bool:
    """Return True if the library exists and is undamaged: loading a damaged one would kill the process."""
    checksum = path.with_suffix(".sha256")
    return path.exists() and checksum.exists() and checksum.read_text() == digest(path.read_bytes())


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run the compiler and return what it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=env)
    except subprocess.TimeoutExpired as error:
        raise BuildError("the C++ compiler took more than 600 s") from error
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "error" in line or "cannot find" in line), lines[-1])
        raise BuildError(f"the C++ compiler failed: {reason.strip()}; the command was {shlex.join(command)}")
    return done.stdout


@contextlib.contextmanager
def _lock(path: Path, *, quiet: bool) -> Iterator[None]:
    """Hold the lock file, or go on without it after LOCK_SECONDS: building twice is harmless."""
    try:
        import fcntl
    except ImportError:  # the system has no such locks
        yield
        return
    # Do not follow a link: it may lead to a file that must not be touched.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        told = quiet
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not told:
                _report("waiting for another process, which builds the CPU kernels")
                told = True
            time.sleep(0.1)
        yield
