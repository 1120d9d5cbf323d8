"""Where cells are run: local processes, or a Ray cluster. Both yield each cell with its result as it gets done."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hypermlp.mad.backbones import MakeMixer
from hypermlp.mad.protocol import Cell
from hypermlp.mad.training import Progress, run_cell

ATTEMPTS = 3  # of a cell whose process is lost
Tell = Callable[[Cell, Progress], None]
Results = Iterator[tuple[Cell, dict[str, Any]]]


class CellError(RuntimeError):
    """A cell that cannot be run."""


def resolve_mixer(name: str) -> MakeMixer | None:
    """None for a label or registered name; the function behind "package.module:function"."""
    if ":" not in name:
        return None
    module, _, attribute = name.partition(":")
    try:
        found: MakeMixer = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"mixer {name!r} cannot be imported: {error}; allowed: a label, or package.module:function") from error
    return found


@dataclass(kw_only=True)
class Local:
    """Processes of this machine; one that dies is started again."""

    jobs: int = 1
    threads: int | None = None
    """Of each; None to share the cores among them."""
    device: str = "cpu"
    _waiting: list[tuple[Cell, int]] = field(default_factory=list, init=False)
    _running: dict[Connection, tuple[Cell, int, Any]] = field(default_factory=dict, init=False)

    def run(self, cells: list[Cell], tell: Tell) -> Results:
        self._waiting = [(cell, 1) for cell in reversed(cells)]
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self.jobs:
                    self._start(*self._waiting.pop())
                for connection in wait(list(self._running)):
                    result = self._hear(connection, tell)  # type: ignore[arg-type]
                    if result is not None:
                        yield result
        finally:
            for _, _, process in self._running.values():
                process.kill()
            self._running.clear()

    def _start(self, cell: Cell, attempt: int) -> None:
        context: Any = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
        if os.name != "nt":
            context.set_forkserver_preload(["hypermlp.mad.training"])  # imported once
        ours, theirs = context.Pipe(duplex=False)
        threads = self.threads or max(1, torch.get_num_threads() // self.jobs)
        process = context.Process(target=_work, args=(theirs, cell, threads, self.device), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = cell, attempt, process

    def _hear(self, connection: Connection, tell: Tell) -> tuple[Cell, dict[str, Any]] | None:
        cell, attempt, process = self._running[connection]
        try:
            kind, content = connection.recv()
        except EOFError:
            kind, content = "lost", None
        if kind == "progress":
            tell(cell, content)
            return None
        del self._running[connection]
        process.join()
        if kind == "done":
            return cell, content
        if kind == "error":
            raise CellError(f"{cell.mixer}, {cell.task}: {content}")
        if attempt == ATTEMPTS:
            raise CellError(f"{cell.mixer}, {cell.task}: its process died {ATTEMPTS} times, last with code {process.exitcode}")
        self._waiting.append((cell, attempt + 1))
        return None


def _work(connection: Connection, cell: Cell, threads: int, device: str) -> None:
    try:
        result = _train(cell, threads, device, lambda progress: connection.send(("progress", progress)))
        connection.send(("done", result))
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))


def _train(cell: Cell, threads: int, device: str, tell: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return run_cell(cell, mixer=resolve_mixer(cell.mixer), device=device, tell=tell)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster: "auto" for the one that this machine belongs to, or an address."""

    address: str = "auto"
    threads: int = 1
    gpus: float = 0

    def run(self, cells: list[Cell], tell: Tell) -> Results:
        try:
            import ray
        except ImportError as error:
            raise ValueError("--cluster needs Ray: pip install 'hypermlp[cluster]'") from error
        if not ray.is_initialized():
            ray.init(address=self.address, logging_level="warning")
        remote = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=ATTEMPTS)(_train)
        running = {remote.remote(cell, self.threads, "cuda" if self.gpus else "cpu"): cell for cell in cells}
        while running:
            done, _ = ray.wait(list(running))
            for reference in done:
                cell = running.pop(reference)
                try:
                    yield cell, ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise CellError(f"{cell.mixer}, {cell.task}: {error}") from error
