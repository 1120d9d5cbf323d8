"""Where cells are run: processes of this machine, or a Ray cluster. Both yield each cell with its result as it gets done.

A cell is plain data with a ``title``; ``work(cell, device, tell)`` is a function that a process can import, and its result is a
dictionary. What a cell is, how it is recorded and how a comparison is made of it: hypermlp/jobs/cells.py.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hypermlp.errors import UserError

ATTEMPTS = 3  # of a cell whose process is lost


@dataclass(frozen=True)
class Progress:
    """What a running cell tells."""

    step: int
    steps: int
    seconds: float
    news: str
    """How well it does so far."""


Tell = Callable[[Any, Progress], None]
"""Of a cell."""
Work = Callable[[Any, str, Callable[[Progress], None]], dict[str, Any]]


class CellError(RuntimeError):
    """A cell that could not be run."""


def describe(error: BaseException) -> str:
    """What happened, and in which line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


Results = Iterator[tuple[Any, dict[str, Any] | CellError]]


@dataclass(kw_only=True)
class Local:
    """Processes of this machine; one that dies is started again."""

    jobs: int = 1
    threads: int | None = None
    """Of each; None to share the cores among them."""
    device: str = "cpu"
    _waiting: list[tuple[Any, int]] = field(default_factory=list, init=False)
    _running: dict[Connection, tuple[Any, int, Any]] = field(default_factory=dict, init=False)

    def run(self, work: Work, cells: list[Any], tell: Tell) -> Results:
        self._waiting = [(cell, 1) for cell in reversed(cells)]
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self.jobs:
                    self._start(work, *self._waiting.pop())
                for connection in wait(list(self._running)):
                    result = self._hear(connection, tell)  # type: ignore[arg-type]
                    if result is not None:
                        yield result
        finally:
            for _, _, process in self._running.values():
                process.kill()
            self._running.clear()

    def _start(self, work: Work, cell: Any, attempt: int) -> None:
        context: Any = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
        if os.name != "nt":
            context.set_forkserver_preload([_module(work)])  # imported once
        ours, theirs = context.Pipe(duplex=False)
        threads = self.threads or max(1, torch.get_num_threads() // self.jobs)
        process = context.Process(target=_serve, args=(theirs, work, cell, threads, self.device), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = cell, attempt, process

    def _hear(self, connection: Connection, tell: Tell) -> tuple[Any, dict[str, Any] | CellError] | None:
        cell, attempt, process = self._running[connection]
        try:
            kind, content = connection.recv()
        except (EOFError, OSError):  # between two messages, or within one
            kind, content = "lost", None
        if kind == "progress":
            tell(cell, content)
            return None
        del self._running[connection]
        process.join()
        if kind == "done":
            return cell, content
        if kind == "error":
            return cell, CellError(f"{cell.title}: {content}")
        if attempt == ATTEMPTS:
            return cell, CellError(
                f"{cell.title}: its process died {ATTEMPTS} times, last with code {process.exitcode}"
            )
        self._waiting.append((cell, attempt + 1))
        return None


def _module(work: Any) -> str:
    return str(getattr(work, "func", work).__module__)  # of a function, or of a partial one


def _end_with_parent() -> None:
    """A process whose starter was killed would go on by itself, and be in the way of whoever starts the work again."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(connection: Connection, work: Work, cell: Any, threads: int, device: str) -> None:
    _end_with_parent()
    torch.set_num_threads(threads)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        try:
            connection.send(
                ("done", work(cell, device, lambda progress: connection.send(("progress", progress))))
            )
        except BrokenPipeError:
            raise
        except Exception as error:
            connection.send(("error", describe(error)))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster: "auto" for the one that this machine belongs to, or an address. A cell whose worker is lost runs again elsewhere."""

    address: str = "auto"
    threads: int = 1
    gpus: float = 0

    def run(self, work: Work, cells: list[Any], tell: Tell) -> Results:
        ray = self._connect()
        self._check_resources(ray)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, scheduling_strategy=here)(_Board).remote()
        remote = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(_serve_far)
        device = "cuda" if self.gpus else "cpu"
        running = {
            remote.remote(work, i, cell, self.threads, device, board): cell for i, cell in enumerate(cells)
        }
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
            raise UserError("--cluster needs Ray: pip install 'hypermlp[cluster]'") from error
        if not ray.is_initialized():
            try:
                _knock(self.address)
                ray.init(address=self.address, logging_level=logging.WARNING)
            except (OSError, ValueError, RuntimeError) as error:
                advice = "start one with `ray start --head` and add machines with `ray start --address=...`"
                raise UserError(f"no Ray cluster at {self.address!r} ({error}); {advice}") from error
        return ray

    def _check_resources(self, ray: Any) -> None:
        """Ray would wait for such a machine to come."""
        offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            offer.get("CPU", 0) >= self.threads and offer.get("GPU", 0) >= self.gpus for offer in offers
        ):
            most = ", ".join(
                f"{offer.get('CPU', 0):g} CPUs and {offer.get('GPU', 0):g} GPUs" for offer in offers
            )
            raise UserError(
                f"no machine of the cluster has --threads {self.threads} and --gpus {self.gpus:g}; they have {most}"
            )

    @staticmethod
    def _result(ray: Any, cell: Any, reference: Any) -> dict[str, Any] | CellError:
        try:
            result: dict[str, Any] | CellError = ray.get(reference)
        except ray.exceptions.RayError as error:
            return CellError(f"{cell.title}: its worker was lost {ATTEMPTS} times, or never began; {error}")
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


def _serve_far(
    work: Work, i: int, cell: Any, threads: int, device: str, board: Any
) -> dict[str, Any] | CellError:
    torch.set_num_threads(threads)
    try:
        return work(cell, device, lambda progress: board.put.remote(i, progress))
    except Exception as error:
        return CellError(f"{cell.title}: {describe(error)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, in processes (default: 1)")
    parser.add_argument("--threads", type=int, help="of each process (default: the cores, shared)")
    parser.add_argument("--device", default="cpu", help="of local processes (default: cpu)")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", nargs="?", const="auto", help="run on a Ray cluster instead"
    )
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each cell on the cluster (default: 0)")


def chosen(args: argparse.Namespace) -> Local | Cluster:
    if args.jobs < 1 or (args.threads is not None and args.threads < 1):
        raise UserError(f"--jobs is {args.jobs}, --threads {args.threads}; they must be at least 1")
    if args.gpus < 0 or (args.gpus and not args.cluster):
        raise UserError(f"--gpus is {args.gpus}; it must be 0 or more, and goes with --cluster")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device is {args.device!r}, which cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    if args.cluster:
        return Cluster(address=args.cluster, threads=args.threads or 1, gpus=args.gpus)
    return Local(jobs=args.jobs, threads=args.threads, device=args.device)
