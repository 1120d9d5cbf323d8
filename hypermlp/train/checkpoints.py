"""Checkpoints that are complete or absent.

A checkpoint is written beside its place, sealed with the checksums of its files, and renamed. What has no seal, or does not
fit it, does not exist.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

SEAL = "complete.json"
ASIDE = ".part"
NAME = re.compile(r"checkpoint-(\d+)")


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """Write the checksums of everything in the folder, and make sure that it all reached the disk."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL):
        digests[path.relative_to(folder).as_posix()] = file_digest(path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    with open(folder / SEAL, "w") as file:
        json.dump({"sha256": digests}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def problem(folder: Path) -> str | None:
    """Why this is no complete checkpoint; None if it is one."""
    if not (folder / SEAL).is_file():
        return "it has no seal"
    try:
        for name, digest in json.loads((folder / SEAL).read_text())["sha256"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if file_digest(folder / name) != digest:
                return f"the checksum of {name} differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
    return None


def step_of(folder: Path) -> int:
    match = NAME.fullmatch(folder.name)
    return -1 if match is None else int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """Folders that are called checkpoints, newest first."""
    found = (
        path
        for path in run.glob("checkpoint-*")
        if step_of(path) >= 0 and path.is_dir() and not path.is_symlink()
    )
    return sorted(found, key=step_of, reverse=True)


def newest_complete(run: Path, *, put_away: bool = False) -> Path | None:
    """The newest one that is whole; says which ones it passes over, and may rename them so that nobody counts them again."""
    for folder in checkpoints(run):
        reason = problem(folder)
        if reason is None:
            return folder
        print(f"passing over {folder}: {reason}", flush=True)
        if put_away:
            shutil.rmtree(run / f"damaged-{folder.name}", ignore_errors=True)
            folder.rename(run / f"damaged-{folder.name}")
    return None


def put_in_place(aside: Path, folder: Path) -> None:
    """Seal a folder that was written aside, and give it its name; one that has it already goes, once the new one is sealed."""
    seal(aside)
    before = aside.with_name(aside.name + ".before")
    if folder.exists():
        folder.rename(before)
    aside.rename(folder)
    shutil.rmtree(before, ignore_errors=True)
    directory = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_old(run: Path, keep: int) -> None:
    for folder in checkpoints(run)[keep:]:
        shutil.rmtree(folder)


def remove_unfinished(run: Path) -> None:
    shutil.rmtree(run / ASIDE, ignore_errors=True)
