"""Folders that are complete or absent: checkpoints, final models and shipped models.

A folder is written aside, sealed with the checksums of its files (``complete.json``), and put in place by one
rename. It is complete if every file matches the seal; an incomplete one is treated as absent. Prepared data
has a seal of its own (train/data.py) and uses ``replace`` alone.
"""

import ctypes
import hashlib
import json
import os
import shutil
from pathlib import Path

SEAL = "complete.json"
ASIDE = ".part"
"""Folder in a run where checkpoints are written before they are complete."""
BEFORE = ".before"
"""End of the hidden name of a folder that is being replaced, on systems that cannot exchange two folders."""


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def put_in_place(aside: Path, folder: Path) -> None:
    """Seal the folder ``aside``, flush all of it to the disk, and make it ``folder``; see ``replace``."""
    content = digests(aside)
    (aside / SEAL).write_text(json.dumps({"sha256": content}, indent=2))
    for name in (*content, SEAL):
        _flush(aside / name)
    replace(aside, folder)


def problem(folder: Path) -> str | None:
    """Return why ``folder`` is not a complete checkpoint, or None if it is one."""
    try:
        sealed = json.loads((folder / SEAL).read_text())["sha256"]
        if not any(name.endswith(".safetensors") for name in sealed):
            return f"its {SEAL} lists no weights"
        for name, digest in sealed.items():
            if file_digest(folder / name) != digest:
                return f"the checksum of {name} differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return None


def changed_weights(folder: Path) -> str | None:
    """Return the name of a file of weights that differs from the folder's seal; None without a seal.

    The other files may be edited by hand, such as generation_config.json.
    """
    try:
        sealed = dict(json.loads((folder / SEAL).read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name, digest in sealed.items():
        path = folder / name
        is_weights = path.suffix == ".safetensors" and path.parent == folder
        if is_weights and path.is_file() and file_digest(path) != digest:
            return str(name)
    return None


def replace(aside: Path, folder: Path) -> None:
    """Rename the finished folder ``aside`` to ``folder`` and remove what was there before.

    Whenever the process is killed, the old content or the new one survives. Where the system can exchange two
    folders (Linux), ``folder`` has one of them at every moment. Elsewhere it takes two renames, and after a
    kill between them ``restore`` brings the old content back.
    """
    restore(folder)
    if not folder.exists():
        aside.rename(folder)
        _flush(folder.parent)
    elif _exchange(aside, folder):
        _flush(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(_hidden(folder))
        try:
            aside.rename(folder)
            _flush(folder.parent)
        finally:
            restore(folder)


def restore(folder: Path) -> None:
    """Undo a replacement of ``folder`` by two renames that ended between them, or remove what it left."""
    before = _hidden(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        before.rename(folder)


def restore_all(parent: Path) -> None:
    """Call ``restore`` for all folders in ``parent``; no other process may be replacing one of them."""
    for before in parent.glob(f".*{BEFORE}"):
        restore(parent / before.name[1 : -len(BEFORE)])


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{BEFORE}")


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return whether the system and the file system can do that."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2  # of Linux; Python has no function for it
    except (AttributeError, OSError, TypeError):
        return False
    relative_to_here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(relative_to_here, names[0], relative_to_here, names[1], exchange) == 0)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The checkpoints of a run.


def step_of(folder: Path) -> int:
    """Return the step in the name ``checkpoint-STEP``, or -1 for any other name."""
    step = folder.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run that are named like checkpoints, newest first."""
    named = (path for path in run.glob("checkpoint-*") if step_of(path) >= 0)
    folders = (path for path in named if path.is_dir() and not path.is_symlink())
    return sorted(folders, key=step_of, reverse=True)


def newest_complete(run: Path, *, put_away: bool = False) -> Path | None:
    """Return the newest complete checkpoint of a run, and print a line for each one that is skipped.

    With ``put_away``, these are renamed ``damaged-checkpoint-STEP``, so that they are not found again.
    """
    for folder in checkpoints(run):
        reason = problem(folder)
        if reason is None:
            return folder
        print(f"passing over {folder}: {reason}", flush=True)
        if put_away:
            damaged = run / f"damaged-{folder.name}"
            shutil.rmtree(damaged, ignore_errors=True)
            folder.rename(damaged)
    return None


def remove_old(run: Path, keep: int) -> None:
    """Remove all checkpoints of a run but the newest ``keep``."""
    for folder in checkpoints(run)[keep:]:
        shutil.rmtree(folder)


def remove_unfinished(run: Path) -> None:
    """Remove what was written aside and never completed."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
