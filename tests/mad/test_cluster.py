"""The same cells on a Ray cluster of two nodes, here on one machine."""

import os
import signal
from dataclasses import replace

import pytest

from hypermlp.cli import main
from hypermlp.jobs.cells import recorded, run_cells
from hypermlp.jobs.workers import CellError, Cluster, Local
from hypermlp.mad.protocol import GRIDS, cells
from hypermlp.mad.training import run_cell

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed: pip install 'hypermlp[cluster]'"
)
pytestmark = [
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.thorough,
]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_missing_cluster_is_reported(tmp_path, capsys, address):
    words = ["mad", "run", "--mixer", "S-p", "--grid", "smoke", "--out", str(tmp_path)]
    assert main([*words, "--cluster", address]) == 2
    assert f"no Ray cluster at {address!r}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def address():
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster_utils.ray.shutdown()
    cluster.shutdown()


def smoke(*tasks, mixer="R-cg-q-12o"):
    return list(cells(mixer, GRIDS["smoke"], list(tasks)))


def timeless(result):
    return {key: value for key, value in result.items() if key != "seconds"}


def test_a_comparison_gives_the_records_of_local_processes(address, tmp_path, capsys):
    tasks = ["compression", "in-context-recall"]
    words = ["mad", "compare", "S-p", "G-cg-q-12o", "--grid", "smoke", "--threads", "1", "--task", *tasks]
    assert main([*words, "--out", str(tmp_path / "near"), "--jobs", "2"]) == 0
    near = capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "far"), "--cluster", address]) == 0
    far = capsys.readouterr().out
    assert far == near  # the table
    for mixer in ("S-p", "G-cg-q-12o"):
        for cell in smoke(*tasks, mixer=mixer):
            assert timeless(recorded(tmp_path / "far", cell)) == timeless(recorded(tmp_path / "near", cell))


def ray_workers():
    """Processes that run a cell."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                name = file.read()
        except OSError:
            continue
        if name.startswith("ray::_run_remotely"):
            yield int(pid)


def test_a_killed_worker_loses_no_finished_cell(address, tmp_path):
    short, long = smoke("compression")[0], smoke("memorization")[0]
    long = replace(long, training=replace(long.training, epochs=60, solved=2.0))
    killed = []

    def kill_once(cell, progress):
        if cell.task == long.task and recorded(tmp_path, short) is not None and not killed:
            killed.extend(ray_workers())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    found = {
        cell.task: timeless(result)
        for cell, result in run_cells(
            run_cell, [short, long], tmp_path, Cluster(address=address), on_progress=kill_once
        )
    }
    assert len(killed) == 1
    assert found[short.task] == timeless(recorded(tmp_path, short))
    ((_, alone),) = Local(threads=1).run(run_cell, [long], lambda *_: None)
    assert found[long.task] == timeless(alone)


def test_an_error_in_a_cell_is_returned(address):
    (cell,) = smoke("compression")
    ((_, error),) = Cluster(address=address).run(run_cell, [replace(cell, mixer="X")], lambda *_: None)
    assert isinstance(error, CellError)
    assert "compression: UserError: unknown mixer 'X'" in str(error)


def test_requests_that_no_machine_satisfies_are_refused(address):
    with pytest.raises(ValueError, match="no machine of the cluster has --threads 64 and --gpus 0"):
        list(Cluster(address=address, threads=64).run(run_cell, smoke("compression"), lambda *_: None))
