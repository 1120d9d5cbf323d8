"""A sealed folder is complete or absent, and replacing one loses nothing, whenever the process is killed."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from hypermlp import sealed

CHANGES = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlsym")
"""Audit events before everything that a replacement does to the names in a folder."""


def write(folder, content="weights"):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "sub").mkdir()
    (folder / "sub" / "optimizer.pt").write_text("moments")
    return folder


def content(folder):
    return (folder / "model.safetensors").read_text() if folder.exists() else None


def without_exchange(monkeypatch):
    monkeypatch.setattr(sealed, "_exchange", lambda one, other: False)


def test_put_in_place_and_found(tmp_path):
    for step in (20, 100, 3):
        name = f"checkpoint-{step}"
        sealed.put_in_place(write(tmp_path / sealed.ASIDE / name), tmp_path / name)
    names = [path.name for path in sealed.checkpoints(tmp_path)]
    assert names == ["checkpoint-100", "checkpoint-20", "checkpoint-3"]
    assert sealed.newest_complete(tmp_path) == tmp_path / "checkpoint-100"
    sealed.remove_old(tmp_path, keep=2)
    assert len(sealed.checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["no seal", "empty seal", "missing", "changed", "cut"])
def test_what_is_damaged_is_passed_over(tmp_path, damage, capsys):
    for step in (1, 2):
        sealed.put_in_place(write(tmp_path / "aside"), tmp_path / f"checkpoint-{step}")
    newest = tmp_path / "checkpoint-2"
    if damage == "no seal":
        (newest / sealed.SEAL).unlink()
    elif damage == "empty seal":
        shutil.rmtree(newest)
        newest.mkdir()
        (newest / sealed.SEAL).write_text('{"sha256": {}}')
    elif damage == "missing":
        (newest / "sub" / "optimizer.pt").unlink()
    else:
        (newest / "model.safetensors").write_text("weighty" if damage == "changed" else "")
    assert sealed.newest_complete(tmp_path) == tmp_path / "checkpoint-1"
    assert f"passing over {newest}" in capsys.readouterr().out


def test_unfinished_ones_are_removed_and_nothing_is_no_checkpoint(tmp_path):
    write(tmp_path / sealed.ASIDE / "checkpoint-5")
    assert sealed.newest_complete(tmp_path) is None
    sealed.remove_unfinished(tmp_path)
    assert not (tmp_path / sealed.ASIDE).exists()


def replace_until(change, aside, folder, exchange):
    """Replace a folder, and end with SIGKILL before the change of that number to the names."""
    if not exchange:
        sealed._exchange = lambda one, other: False
    left = change

    def hook(event, _arguments):
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sealed.put_in_place(Path(aside), Path(folder))


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, server, exchange):
    left = []
    for change in range(1, 20):
        parent = tmp_path / str(change)
        old, new = write(parent / "model", "old"), write(parent / "aside" / "model", "new")
        process = server.Process(target=replace_until, args=(change, str(new), str(old), exchange))
        process.start()
        process.join(60)
        if exchange:
            assert content(old) in ("old", "new"), "there is no moment without the folder"
        sealed.restore_all(parent)
        assert content(old) in ("old", "new")
        assert (old / "sub" / "optimizer.pt").exists()
        left.append(content(old))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert left[0] == "old", "killed before the first change"
    assert left[-2:] == ["new", "new"], "killed while removing the old one, and not killed"


def test_a_replacement_that_fails_keeps_the_old(tmp_path, monkeypatch):
    """The folder aside may lie in a temporary folder, which is deleted on failure."""
    without_exchange(monkeypatch)
    old, new = write(tmp_path / "model", "old"), write(tmp_path / "temporary" / "model", "new")
    rename = Path.rename

    def failing(path, target):
        if path == new:
            raise OSError("the disk is full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is full"):
        sealed.put_in_place(new, old)
    shutil.rmtree(new.parent)
    assert content(old) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
