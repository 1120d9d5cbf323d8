"""Write checkpoints that are complete or absent.

A checkpoint is written beside its place, sealed with the checksums of its files, and renamed.
hypermlp/models/loading.py verifies the seal and finds the newest complete checkpoint.
"""

import json
import os
import shutil
from pathlib import Path

from hypermlp.models.loading import SEAL, checkpoints, file_digest

ASIDE = ".part"
"""Folder in a run where checkpoints are written before they are complete."""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in files}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(aside: Path, folder: Path) -> None:
    """Rename the finished folder ``aside`` to ``folder``, replacing any that exists, and flush the name."""
    before = aside.with_name(f"{aside.name}.before")
    if folder.exists():
        folder.rename(before)
    aside.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    _flush(folder.parent)


def put_in_place(aside: Path, folder: Path) -> None:
    """Publish a checkpoint that was written aside as ``folder``, replacing any existing one.

    Before that, seal it with the checksums of its files, and flush all of it to the disk.
    """
    content = digests(aside)
    (aside / SEAL).write_text(json.dumps({"sha256": content}, indent=2))
    for name in (*content, SEAL):
        _flush(aside / name)
    publish_folder(aside, folder)


def remove_old(run: Path, keep: int) -> None:
    """Remove all checkpoints of a run but the newest ``keep``."""
    for folder in checkpoints(run)[keep:]:
        shutil.rmtree(folder)


def remove_unfinished(run: Path) -> None:
    """Remove what was written aside and never completed."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
