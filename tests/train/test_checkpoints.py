"""A checkpoint is complete or absent."""

import shutil

import pytest

from hypermlp.models import loading
from hypermlp.train import checkpoints


def write(folder, content="weights"):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "sub").mkdir()
    (folder / "sub" / "optimizer.pt").write_text("moments")


def test_put_in_place_and_found(tmp_path):
    for step in (20, 100, 3):
        write(tmp_path / checkpoints.ASIDE / f"checkpoint-{step}")
        checkpoints.put_in_place(
            tmp_path / checkpoints.ASIDE / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}"
        )
    assert [path.name for path in loading.checkpoints(tmp_path)] == [
        "checkpoint-100",
        "checkpoint-20",
        "checkpoint-3",
    ]
    assert loading.newest_complete(tmp_path) == tmp_path / "checkpoint-100"
    checkpoints.remove_old(tmp_path, keep=2)
    assert len(loading.checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["no seal", "empty seal", "missing", "changed", "cut"])
def test_what_is_damaged_is_passed_over(tmp_path, damage, capsys):
    for step in (1, 2):
        write(tmp_path / "aside")
        checkpoints.put_in_place(tmp_path / "aside", tmp_path / f"checkpoint-{step}")
    newest = tmp_path / "checkpoint-2"
    if damage == "no seal":
        (newest / loading.SEAL).unlink()
    elif damage == "empty seal":
        shutil.rmtree(newest)
        newest.mkdir()
        (newest / loading.SEAL).write_text('{"sha256": {}}')
    elif damage == "missing":
        (newest / "sub" / "optimizer.pt").unlink()
    else:
        (newest / "model.safetensors").write_text("weighty" if damage == "changed" else "")
    assert loading.newest_complete(tmp_path) == tmp_path / "checkpoint-1"
    assert f"passing over {newest}" in capsys.readouterr().out


def test_unfinished_ones_are_removed_and_nothing_is_no_checkpoint(tmp_path):
    write(tmp_path / checkpoints.ASIDE / "checkpoint-5")
    assert loading.newest_complete(tmp_path) is None
    checkpoints.remove_unfinished(tmp_path)
    assert not (tmp_path / checkpoints.ASIDE).exists()
