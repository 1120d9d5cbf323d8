"""Many cells: recorded once, skipped only when everything is equal, nothing lost."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from torch import nn

from hypermlp import mad
from hypermlp.cli import main
from hypermlp.jobs.cells import record_path, recorded, run_cells
from hypermlp.jobs.workers import CellError, Local
from hypermlp.mad.protocol import GRIDS, Training, cells
from hypermlp.mad.report import summarize
from hypermlp.mad.training import run_cell
from hypermlp.reporting.records import read_record

pytestmark = pytest.mark.usefixtures("server")


def smoke(*tasks, mixer="R-cg-q-12o"):
    return list(cells(mixer, GRIDS["smoke"], list(tasks) or ["compression", "memorization"]))


def results(wanted, folder, **where):
    reported = []

    def on_progress(cell, progress):
        reported.append(progress)

    return list(run_cells(run_cell, wanted, folder, Local(**where), on_progress=on_progress)), reported


@pytest.mark.thorough
def test_cells_are_recorded_and_not_run_again(tmp_path):
    first, reported = results(smoke(), tmp_path, jobs=2, threads=1)
    assert len(first) == 2
    assert reported
    again, reported = results(smoke(), tmp_path)
    assert not reported
    assert sorted(r["score"] for _, r in again) == sorted(r["score"] for _, r in first)


def run_smoke(folder, mixer, *words, task="compression"):
    """Run a mixer on the smoke grid; return the status of the command."""
    where = ["--out", str(folder), "--threads", "1"]
    return main(["mad", "run", "--grid", "smoke", "--task", task, "--mixer", mixer, *where, *words])


@pytest.mark.thorough
def test_the_paper_s_names_are_those_of_labels(tmp_path, capsys):
    assert run_smoke(tmp_path, "HyperGLU") == 0
    assert "| G-cg-q-12o |" in capsys.readouterr().out
    (record,) = tmp_path.rglob("*.json")
    assert record.name.startswith("G-cg-q-12o-")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 3},
        {"width": 48},
        {"sampler": "published"},
        {"mixer": "S-p"},
        {"settings": {"seq_len": 30, "num_train": 64, "num_test": 32}},
        {"training": Training(learning_rate=2e-3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_difference_is_another_cell(tmp_path, change):
    (cell,) = smoke("compression")
    results([cell], tmp_path)
    assert recorded(tmp_path, cell) is not None
    assert recorded(tmp_path, replace(cell, **change)) is None
    assert record_path(tmp_path, cell) != record_path(tmp_path, replace(cell, **change))


def test_cells_can_be_changed(tmp_path):
    changes = ["num_train=32", "width=16", "learning_rate=5e-4"]
    options = [word for change in changes for word in ("--set", change)]
    assert run_smoke(tmp_path, "S-p", *options, "--schedule", "cosine") == 0
    (path,) = tmp_path.glob("compression/*.json")
    settings = read_record(path, "mad")["settings"]
    assert (settings["settings"]["num_train"], settings["width"]) == (32, 16)
    assert settings["training"]["learning_rate"] == 5e-4
    assert settings["training"]["schedule"] == "cosine"


@pytest.mark.thorough
def test_a_worker_that_is_killed_is_started_again(tmp_path):
    (cell,) = smoke("in-context-recall")
    cell = replace(cell, training=replace(cell.training, epochs=60))
    killed = []

    def kill_once(_, progress):
        if not killed:
            children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_worker(int(pid))]
            killed.append(children)
            for pid in children:
                os.kill(pid, signal.SIGKILL)

    found = list(run_cells(run_cell, [cell], tmp_path, Local(threads=1), on_progress=kill_once))
    assert killed[0]
    assert found[0][1]["steps"] == 120 or found[0][1]["score"] > 0.999


def is_worker(pid):
    """Whether the process is a child of the fork server of this process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
        with open(f"/proc/{parent}/cmdline") as file:
            server = "forkserver" in file.read()
        with open(f"/proc/{parent}/stat") as file:
            ours = int(file.read().rsplit(")", 1)[1].split()[1]) == os.getpid()
    except (OSError, IndexError):
        return False
    return server and ours


def test_ctrl_c_prints_how_to_continue(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Local, "run", interrupted)
    assert run_smoke(tmp_path, "S-p", task="all") == 130
    printed = capsys.readouterr().err
    assert "interrupted: 0 of 6 cells are recorded; run the same command again to continue" in printed


def test_an_interruption_keeps_what_is_done(tmp_path):
    quick, long = smoke("compression")[0], smoke("memorization")[0]
    long = replace(long, training=replace(long.training, epochs=10_000, evaluate_every=10))

    def interrupt(cell, progress):
        if cell.task == "memorization":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_cells(run_cell, [quick, long], tmp_path, Local(threads=1), on_progress=interrupt))
    assert recorded(tmp_path, quick) is not None
    assert recorded(tmp_path, long) is None
    until = time.monotonic() + 60
    while any(is_worker(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < until, "a worker goes on after the interruption"
        time.sleep(0.1)


def test_scores_are_means_over_settings_of_the_best_rate():
    base = smoke("compression")[0]
    other = replace(base, settings={**base.settings, "vocab_size": 32})
    faster = replace(base, training=replace(base.training, learning_rate=0.1))
    table = summarize([(base, {"score": 0.2}), (faster, {"score": 0.6}), (other, {"score": 0.1})])
    assert table.scores["R-cg-q-12o"]["compression"] == pytest.approx((0.6 + 0.1) / 2)
    assert table.average("R-cg-q-12o") is None
    assert "35.0 (49.2)" in str(table)  # the paper's beside it


def test_a_function_in_python():
    def make(hidden_size, max_length):
        return nn.Linear(hidden_size, hidden_size)

    table = mad.benchmark(make, grid="smoke", tasks=["compression"])
    assert table.scores["make"]["compression"] >= 0


MODULE = """
import torch
from torch import nn

class Late(nn.Module):
    def forward(self, x):
        return x if not self.training else 1 / 0

class Ahead(nn.Module):
    def forward(self, x):
        return x.roll(-1, 1)

class Broad(nn.Module):
    def forward(self, x):
        return x[:, :1]

def fine(hidden_size, max_length): return nn.Linear(hidden_size, hidden_size)
def late(hidden_size, max_length): return Late()
def ahead(hidden_size, max_length): return Ahead()
def broad(hidden_size, max_length): return Broad()
def wide(hidden_size, max_length): return nn.Linear(hidden_size, hidden_size + 1)
def double(hidden_size, max_length): return nn.Linear(hidden_size, hidden_size).double()
def nothing(hidden_size, max_length): return None
def function(hidden_size, max_length): return lambda x: x
def names(dim, length): return nn.Identity()
number = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module in the current folder, with a new name each time because imports are cached."""
    monkeypatch.chdir(tmp_path)
    name = f"user_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_a_module_that_was_edited_is_another_cell(user_module, tmp_path, capsys):
    assert run_smoke("records", f"{user_module}:fine") == 0
    assert run_smoke("records", f"{user_module}:fine") == 0
    assert "1 of 1 cells are recorded" in capsys.readouterr().err
    (tmp_path / f"{user_module}.py").write_text(MODULE + "# edited")
    assert run_smoke("records", f"{user_module}:fine") == 0
    assert "0 of 1 cells are recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("ahead", "is not causal"),
        ("broad", "it must return a tensor of the same shape"),
        ("wide", "it must return a tensor of the same shape"),
        ("double", "fails: RuntimeError"),
        ("nothing", "it returned a NoneType"),
        ("function", "it returned a function"),
        ("names", "it must be a function make(hidden_size=..., max_length=...)"),
        ("number", "it must be a function make(hidden_size=..., max_length=...)"),
        ("missing", "cannot be imported: AttributeError"),
        ("", "allowed: a label such as"),
    ],
)
def test_a_module_is_tried_before_training(user_module, capsys, made, message):
    assert run_smoke("records", f"{user_module}:{made}") == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "cells are recorded" not in printed


def test_a_cell_that_fails_does_not_stop_the_others(user_module, capsys):
    words = ["--grid", "smoke", "--task", "compression", "--threads", "1", "--out", "records"]
    assert main(["mad", "compare", f"{user_module}:late", "S-p", *words]) == 2
    printed = capsys.readouterr()
    assert "| S-p | " in printed.out
    assert f"ZeroDivisionError: division by zero ({os.getcwd()}/{user_module}.py:7)" in printed.err
    assert "1 of the cells failed; the others are recorded" in printed.err


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["mad", "run", "--mixer", "S-p", "--grid", "smoke", "--out", str(tmp_path / "file")]) == 2
    assert "step" not in capsys.readouterr().err


def test_a_damaged_record_is_reported(tmp_path, capsys):
    (cell,) = smoke("compression")
    path = record_path(tmp_path, cell)
    path.parent.mkdir()
    for content in (b"{", b"\xff", b'{"format": 1}'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path.name} is not a record.*remove the file"):
            recorded(tmp_path, cell)


@pytest.mark.thorough
def test_a_worker_exits_when_its_parent_is_killed(tmp_path):
    """The worker exits although it sends nothing that would fail."""
    script = f"""
from dataclasses import replace
from hypermlp.mad.protocol import GRIDS, cells
from hypermlp.mad.training import run_cell
from hypermlp.jobs.workers import Local
(cell,) = cells("S-p", GRIDS["smoke"], ["compression"])
cell = replace(cell, training=replace(cell.training, epochs=10**6, evaluate_every=10**6))
import multiprocessing, threading, time
def write_pid():
    while not (children := multiprocessing.active_children()): time.sleep(0.05)
    open({str(tmp_path / "pid")!r}, "w").write(str(children[0].pid))
threading.Thread(target=write_pid).start()
list(Local(threads=1).run(run_cell, [cell], lambda *_: None))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None
            time.sleep(0.1)
        worker = int((tmp_path / "pid").read_text())
        time.sleep(2)
        assert os.path.exists(f"/proc/{worker}")
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 60
    while running(worker):
        assert time.monotonic() < until
        time.sleep(0.1)


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mixer", "Q-x"], "Q"),
        (["--mixer", "S-p", "--task", "recall"], "unknown task 'recall'; allowed: in-context-recall"),
        (["--mixer", "S-p", "--grid", "tiny"], "unknown grid 'tiny'; allowed: full, mini, smoke"),
        (["--mixer", "no.such:thing"], "mixer 'no.such:thing' cannot be imported"),
        (["--mixer", "math:nothing"], "mixer 'math:nothing' cannot be imported"),
        (["--mixer", "S-p", "--jobs", "0"], "--jobs is 0"),
        (
            ["--mixer", "S-p", "--set", "num_trian=5"],
            "in-context-recall has no setting 'num_trian' (did you mean 'num_train'?); allowed: ",
        ),
        (["--mixer", "S-p", "--set", "learning_rate=fast"], "learning_rate is 'fast'"),
        (["--mixer", "S-p", "--set", "epochs=1.5"], "epochs is 1.5"),
        (["--mixer", "S-p", "--set", "width"], "--set is 'width'"),
        (["--mixer", "S-p", "--set", "num_test=0"], "num_test is 0"),
        (["--mixer", "S-p", "--device", "nosuch"], "--device is 'nosuch'"),
        (["--mixer", "S-p", "--gpus", "1"], "--gpus is 1"),
        (["--mixer", "torch.nn"], "or package.module:function for a mixer of your own"),
    ],
)
def test_errors_before_training(tmp_path, capsys, arguments, message):
    assert main(["mad", "run", "--out", str(tmp_path), "--grid", "smoke", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_error_in_a_cell_is_returned():
    (cell,) = smoke("compression")
    ((_, error),) = Local(threads=1).run(run_cell, [replace(cell, mixer="X")], lambda *_: None)
    assert isinstance(error, CellError)
    assert "compression: UserError: unknown mixer 'X'" in str(error)


@pytest.mark.parametrize("task", mad.TASKS)
def test_show(task, capsys):
    assert main(["mad", "show", task]) == 0
    out = capsys.readouterr().out
    assert "input  " in out
    assert "target" in out
