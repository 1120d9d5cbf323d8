"""Where cells are run: local processes, or a Ray cluster. Both yield each cell with its result as it gets done."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import socket
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
    """A Ray cluster: "auto" for the one that this machine belongs to, or an address. A cell whose worker is lost runs again elsewhere."""

    address: str = "auto"
    threads: int = 1
    gpus: float = 0

    def run(self, cells: list[Cell], tell: Tell) -> Results:
        ray = self._connect()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
        remote = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(_train_far)
        device = "cuda" if self.gpus else "cpu"
        running = {remote.remote(i, cell, self.threads, device, board): cell for i, cell in enumerate(cells)}
        try:
            while running:
                done, _ = ray.wait(list(running), timeout=0.2)
                for i, progress in ray.get(board.take.remote()):
                    tell(cells[i], progress)
                for reference in done:
                    yield running[reference], self._result(ray, running[reference], reference)
                    del running[reference]
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            ray.kill(board)

    def _connect(self) -> Any:
        try:
            import ray
        except ImportError as error:
            raise ValueError("--cluster needs Ray: pip install 'hypermlp[cluster]'") from error
        if not ray.is_initialized():
            try:
                _knock(self.address)
                ray.init(address=self.address, logging_level=logging.WARNING)
            except (OSError, ValueError, RuntimeError) as error:
                advice = "start one with `ray start --head` and add machines with `ray start --address=...`"
                raise ValueError(f"no Ray cluster at {self.address!r} ({error}); {advice}") from error
        return ray

    @staticmethod
    def _result(ray: Any, cell: Cell, reference: Any) -> dict[str, Any]:
        try:
            result: dict[str, Any] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise CellError(f"{cell.mixer}, {cell.task}: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise CellError(f"{cell.mixer}, {cell.task}: its worker was lost {ATTEMPTS} times; {error}") from error
        return result


def _knock(address: str) -> None:
    """Ray waits for minutes where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


class _Board:
    """Where workers that are far away put what they have to tell; beside the driver, so that it lives as long."""

    def __init__(self) -> None:
        self.news: list[tuple[int, Progress]] = []

    def put(self, i: int, progress: Progress) -> None:
        self.news.append((i, progress))

    def take(self) -> list[tuple[int, Progress]]:
        news, self.news = self.news, []
        return news


def _train_far(i: int, cell: Cell, threads: int, device: str, board: Any) -> dict[str, Any]:
    return _train(cell, threads, device, lambda progress: board.put.remote(i, progress))
