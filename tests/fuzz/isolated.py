"""Run the command line in a fresh process that begins with everything imported.

A server process imports the package once and forks a child for each call, so that no call sees what another
left behind. The child is limited in time, memory and file sizes.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from fuzz.core import die_with_parent, environment

PRELOADED = [
    "hypermlp.cli", "hypermlp.train.run", "hypermlp.mad.training", "hypermlp.commands.sample",
    "hypermlp.commands.report", "hypermlp.commands.study", "hypermlp.commands.inspect",
    "hypermlp.commands.plan", "hypermlp.commands.flops", "hypermlp.commands.bench",
]  # fmt: skip
MEMORY = 24 << 30  # bytes of address space; PyTorch's libraries map a few
FILE_SIZE = 1 << 28
POLL = 0.02  # seconds
GRACE = 60.0  # seconds that a command has to end by itself after a signal that it can handle
TRACEBACK = 70
"""Exit status of a child whose command raised anything but SystemExit."""


class Result(NamedTuple):
    """How a command ended; ``status`` is negative for a signal, None if it was killed after ``seconds``.

    ``ended`` tells whether it was still running then.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    ended: bool = False


_server: "subprocess.Popen[str] | None" = None


def run(
    words: list[str], folder: Path, *, seconds: float = 60.0, ending: signal.Signals = signal.SIGKILL
) -> Result:
    """Run ``hypermlp WORDS`` in ``folder``. After ``seconds`` it gets the signal ``ending``."""
    global _server
    folder.mkdir(parents=True, exist_ok=True)
    if _server is None or _server.poll() is not None:
        _server = subprocess.Popen(
            [sys.executable, "-m", "fuzz.isolated"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
    assert _server.stdin is not None
    assert _server.stdout is not None
    began = time.monotonic()
    order = {"words": words, "folder": str(folder), "seconds": seconds, "ending": int(ending)}
    _server.stdin.write(json.dumps(order) + "\n")
    _server.stdin.flush()
    status, ended = json.loads(_server.stdout.readline())
    paths = (folder / ".stdout", folder / ".stderr")
    texts = [path.read_bytes().decode(errors="replace") if path.exists() else "" for path in paths]
    return Result(status, *texts, time.monotonic() - began, ended)


def close() -> None:
    """End the server."""
    global _server
    if _server is not None:
        assert _server.stdin is not None
        assert _server.stdout is not None
        _server.stdin.close()
        _server.wait()
        _server.stdout.close()
        _server = None


def serve() -> None:
    """Run commands that standard input names, one after another, each in a fork; print each status."""
    die_with_parent()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(order["words"], order["folder"])
        status, ended = _wait(child, order["seconds"]), False
        if status is None:
            os.killpg(child, order["ending"])
            status, ended = _wait(child, GRACE if order["ending"] != signal.SIGKILL else 0.0), True
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(json.dumps((status, ended)), flush=True)


def _wait(child: int, seconds: float) -> int | None:
    """Return the exit status; None if the child still runs after ``seconds``."""
    for _ in range(int(seconds / POLL)):  # polls, because a machine may be suspended
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL)
    return None


def _child(words: list[str], folder: str) -> None:
    """Run a command and end the process with its status."""
    die_with_parent()
    os.setsid()  # a group of its own, which can be ended as a whole
    for number, path in ((1, ".stdout"), (2, ".stderr")):
        file = os.open(Path(folder) / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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


if __name__ == "__main__":
    serve()
