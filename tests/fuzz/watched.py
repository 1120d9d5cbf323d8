"""Check cases in a process that is watched: a crash or a case without end is a finding.

The next case after it gets a new process.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzz.core import Case, Finding, Part, die_with_parent, failure

POLL = 0.25


class Watched:
    """A part in a process of its own; ``check`` does what ``Part.check`` does."""

    def __init__(self, part: type[Part], folder: Path):
        self.part, self.folder, self.log = part, folder, folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(self.part, self.folder, other))
        self.process.start()
        other.close()
        self.pipe.recv()  # it has imported everything: the time of a case begins after that

    def check(self, case: Case) -> Counter[str]:
        answer, answered = None, True
        with contextlib.suppress(EOFError, OSError):  # raised if the process ends
            if self.process is None:
                self._start()
            assert self.pipe is not None
            self.pipe.send(case)
            # Polls are counted, not seconds: a machine that was suspended has not hung.
            answered = any(self.pipe.poll(POLL) for _ in range(int(self.part.limit / POLL)))
            answer = self.pipe.recv() if answered else None
        if answer is None:
            raise self._ended(answered)
        if isinstance(answer, Finding):
            raise answer
        return answer

    def _ended(self, crashed: bool) -> Finding:
        """End the process, with its stack in the log, and return what it found."""
        assert self.process is not None
        assert self.process.pid is not None
        if not crashed:
            os.kill(self.process.pid, signal.SIGABRT)
        self.process.join()
        code, self.process = self.process.exitcode or 0, None
        log = self.log.read_bytes()[-3000:].decode(errors="replace")
        if not crashed:
            return Finding("hang", f"no end after {self.part.limit:.0f} s\n{log}")
        return Finding(f"crash, {signal.Signals(-code).name if code < 0 else f'status {code}'}", log)

    def close(self) -> None:
        if self.process is not None and self.pipe is not None:
            self.pipe.close()
            self.process.join()
            self.process = None


def work(part: type[Part], folder: Path, pipe: Connection) -> None:
    """Check the cases that the pipe brings, until it is closed."""
    die_with_parent()
    with (folder / "log.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    os.environ.update(part.environment)
    own = part(folder)
    pipe.send(None)
    try:
        while True:
            pipe.send(failure(own.check, pipe.recv()))
    except EOFError:
        own.close()
