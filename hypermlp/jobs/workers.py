"""Run cells in processes of this machine, or on a Ray cluster.

``Local.run`` and ``Cluster.run`` yield each cell with its result as soon as the cell is done. A cell is
plain data with a ``title``. ``work(cell, device, on_progress)`` trains a cell and returns a dictionary; it
must be a function that another process can import. hypermlp/jobs/cells.py defines cells and their records.
"""

import contextlib
import logging
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hypermlp.errors import UserError

ATTEMPTS = 3  # how often a cell is started if its process or worker dies


@dataclass(frozen=True)
class Progress:
    """Progress of a running cell."""

    step: int
    steps: int
    seconds: float
    """Time since the cell started."""
    metric: str
    """The latest metric as text, such as "loss 2.310"."""


class CellError(RuntimeError):
    """A cell could not be run."""


OnProgress = Callable[[Any, Progress], None]
"""Progress callback, called with (cell, progress)."""
Work = Callable[[Any, str, Callable[[Progress], None]], dict[str, Any]]
"""Function that trains one cell, called with (cell, device, progress callback)."""
Result = dict[str, Any] | CellError
Results = Iterator[tuple[Any, Result]]


def describe(error: BaseException) -> str:
    """Return the type and message of an error, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def run_one(
    work: Work, cell: Any, threads: int, device: str, on_progress: Callable[[Progress], None]
) -> Result:
    """Run one cell in this process; an exception becomes a CellError, so that other cells can continue."""
    torch.set_num_threads(threads)
    try:
        return work(cell, device, on_progress)
    except Exception as error:
        return CellError(f"{cell.title}: {describe(error)}")


@dataclass(frozen=True, kw_only=True)
class Local:
    """Processes of this machine, one for each running cell. A cell whose process dies is started again."""

    jobs: int = 1
    """Cells that run at the same time."""
    threads: int | None = None
    """Threads of each process; None divides the cores among the processes."""
    device: str = "cpu"

    def run(self, work: Work, cells: list[Any], on_progress: OnProgress) -> Results:
        """Yield every cell with its result, in the order in which they finish."""
        waiting = [(cell, 1) for cell in reversed(cells)]
        running: dict[Any, tuple[Any, int, Any]] = {}  # connection -> cell, attempt, process
        connection: Any
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    cell, attempt = waiting.pop()
                    connection, process = self._start(work, cell)
                    running[connection] = cell, attempt, process
                for connection in wait(list(running)):
                    cell, attempt, process = running[connection]
                    message: Progress | Result | None = None  # stays None if the process died
                    with contextlib.suppress(EOFError, OSError):
                        message = connection.recv()
                    if isinstance(message, Progress):
                        on_progress(cell, message)
                        continue
                    del running[connection]
                    process.join()
                    if message is not None:
                        yield cell, message
                    elif attempt < ATTEMPTS:
                        waiting.append((cell, attempt + 1))
                    else:
                        died = f"its process died {ATTEMPTS} times, last with exit code {process.exitcode}"
                        yield cell, CellError(f"{cell.title}: {died}")
        finally:
            for _, _, process in running.values():
                process.kill()

    def _start(self, work: Work, cell: Any) -> tuple[Connection, Any]:
        """Start a process for a cell; return the connection to read its messages from, and the process."""
        context: Any = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
        if os.name != "nt":  # import the module once, not in every process
            function = getattr(work, "func", work)  # ``work`` may be a functools.partial
            context.set_forkserver_preload([function.__module__])
        reader, writer = context.Pipe(duplex=False)
        threads = self.threads or max(1, torch.get_num_threads() // self.jobs)
        process = context.Process(
            target=_run_in_process, args=(writer, work, cell, threads, self.device), daemon=True
        )
        process.start()
        writer.close()
        return reader, process


def _run_in_process(connection: Connection, work: Work, cell: Any, threads: int, device: str) -> None:
    """Run a cell in a new process, and send its progress and then its result."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the parent no longer reads
        connection.send(run_one(work, cell, threads, device, connection.send))


def _exit_with_parent() -> None:
    """Exit when the parent dies, so that orphans hold no locks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Ray cluster. A cell whose worker is lost runs again on another one."""

    address: str = "auto"
    """Address of the cluster; "auto" for the cluster that this machine belongs to."""
    threads: int = 1
    """Threads (and CPUs) of each cell."""
    gpus: float = 0
    """GPUs of each cell."""

    def run(self, work: Work, cells: list[Any], on_progress: OnProgress) -> Results:
        """Yield every cell with its result, in the order in which they finish."""
        ray = self._connect()
        self._check_resources(ray)
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The queue collects progress. It must not live on a worker's node, which may be lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        remote = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(
            _run_remotely
        )
        device = "cuda" if self.gpus else "cpu"
        running = {
            remote.remote(work, i, cell, self.threads, device, queue): cell for i, cell in enumerate(cells)
        }
        try:
            while running:
                done, _ = ray.wait(list(running), timeout=0.2)
                for i, progress in queue.get_nowait_batch(queue.qsize()):
                    on_progress(cells[i], progress)
                for reference in done:
                    cell = running.pop(reference)
                    try:
                        yield cell, ray.get(reference)
                    except ray.exceptions.RayError as error:
                        lost = f"its worker was lost {ATTEMPTS} times, or could not start; {error}"
                        yield cell, CellError(f"{cell.title}: {lost}")
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            queue.shutdown(force=True)

    def _connect(self) -> Any:
        """Return the module ``ray``, connected to the cluster."""
        try:
            import ray
        except ImportError as error:
            raise UserError("--cluster needs Ray: pip install 'hypermlp[cluster]'") from error
        if not ray.is_initialized():
            try:
                _check_reachable(self.address)
                ray.init(address=self.address, logging_level=logging.WARNING)
            except (OSError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"no Ray cluster at {self.address!r} ({error}); start one with `ray start --head` "
                    "and add machines with `ray start --address=...`"
                ) from error
        return ray

    def _check_resources(self, ray: Any) -> None:
        """Fail fast: Ray queues unsatisfiable requests forever."""
        machines = [
            (node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
            for node in ray.nodes()
            if node["Alive"]
        ]
        if not any(cpus >= self.threads and gpus >= self.gpus for cpus, gpus in machines):
            found = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines)
            raise UserError(
                f"no machine of the cluster has --threads {self.threads} and --gpus {self.gpus:g}; "
                f"the machines have {found}"
            )


Workers = Local | Cluster


def _check_reachable(address: str) -> None:
    """Fail fast: Ray retries for minutes if nothing listens at the address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run_remotely(work: Work, i: int, cell: Any, threads: int, device: str, queue: Any) -> Result:
    """Run cell number ``i`` on a worker of the cluster."""
    return run_one(work, cell, threads, device, lambda progress: queue.put((i, progress)))
