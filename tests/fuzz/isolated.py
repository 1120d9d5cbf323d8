"""Run the command line in a fresh process that begins with everything imported.

A fork server imports the package once, so that no call sees what another left behind. The process is limited
in time, memory and file sizes.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from fuzz.core import die_with_parent

PRELOADED = [
    "hypermlp.cli", "hypermlp.train.run", "hypermlp.mad.training", "hypermlp.commands.sample",
    "hypermlp.commands.report", "hypermlp.commands.study", "hypermlp.commands.inspect",
    "hypermlp.commands.plan", "hypermlp.commands.flops", "hypermlp.commands.bench", "fuzz.isolated",
]  # fmt: skip
MEMORY = 24 << 30  # bytes of address space; PyTorch's libraries map a few
FILE_SIZE = 1 << 28
POLL = 0.02  # seconds
GRACE = 60.0  # seconds that a command has to end by itself after a signal that it can handle
TRACEBACK = 70
"""Exit status of a process whose command raised anything but SystemExit."""


class Result(NamedTuple):
    """How a command ended; ``status`` is negative for a signal, None if it was killed after ``seconds``.

    ``ended``: whether it still ran after ``seconds``.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    ended: bool = False


def start(words: list[str], folder: Path) -> ForkServerProcess:
    """Start ``hypermlp WORDS`` in ``folder``; its output goes to the files .stdout and .stderr there."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    started, other = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(words, folder, other))
    process.start()
    other.close()
    started.poll(GRACE)
    return process


def end(process: ForkServerProcess, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process and all that it started."""
    if process.exitcode is None:
        os.killpg(process.pid, number)


def run(
    words: list[str], folder: Path, *, seconds: float = 60.0, ending: signal.Signals = signal.SIGKILL
) -> Result:
    """Run ``hypermlp WORDS`` in ``folder``. After ``seconds`` it gets the signal ``ending``."""
    process, began = start(words, folder), time.monotonic()
    status, ended = _wait(process, seconds), False
    if status is None:
        end(process, ending)
        status, ended = _wait(process, GRACE if ending != signal.SIGKILL else 0.0), True
    end(process)
    process.join()
    texts = [(folder / name).read_bytes().decode(errors="replace") for name in (".stdout", ".stderr")]
    return Result(status, *texts, time.monotonic() - began, ended)


def _wait(process: ForkServerProcess, seconds: float) -> int | None:
    """Return the exit status; None if the process still runs after ``seconds``."""
    for _ in range(int(seconds / POLL)):  # polls, because a machine may be suspended
        process.join(POLL)
        if process.exitcode is not None:
            return process.exitcode
    return None


def _run(words: list[str], folder: Path, started: Connection) -> None:
    """Run a command and end the process with its status."""
    die_with_parent()
    os.setsid()  # a group of its own, which can be ended as a whole
    for number, path in ((1, ".stdout"), (2, ".stderr")):
        file = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")  # as Python opens it
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILE_SIZE)):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    import torch

    from hypermlp.cli import main

    torch.set_num_threads(1)
    started.send(True)
    started.close()
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = TRACEBACK
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
