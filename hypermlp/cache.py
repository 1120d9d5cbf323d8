"""The folder for what can be made again: built kernels and prepared data."""

import os
import stat
from pathlib import Path

from hypermlp.errors import UserError


def cache_directory() -> Path:
    """Return the root of the cache.

    It is ``HYPERMLP_CACHE``, or the folder ``hypermlp`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Built kernels
    are kept in its folder ``kernels``, prepared data in ``data``.
    """
    if chosen := os.environ.get("HYPERMLP_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hypermlp"
    except RuntimeError as error:
        raise UserError(f"there is no cache folder: {error} Name one in HYPERMLP_CACHE.") from error


def require_private(folder: Path, files: str) -> None:
    """Raise if another user can put ``files``, such as "code", into a folder of the cache.

    It and its parent must belong to the user or to root, and other users must not be able to write to them
    (in a parent with the sticky bit, such as /tmp, they cannot replace files). A folder that does not exist
    is private: the user makes it.
    """
    if not hasattr(os, "getuid"):  # the system has no such owners
        return
    for path in (folder.parent, folder):
        try:
            found = path.stat()
        except OSError:
            continue  # nothing can be loaded from there, and building reports the reason
        foreign = found.st_uid not in (os.getuid(), 0)
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid not in (os.getgid(), 0)
        by_others = found.st_mode & stat.S_IWOTH and not (found.st_mode & stat.S_ISVTX and path != folder)
        if foreign or by_group or by_others:
            reason = f"belongs to user {found.st_uid}" if foreign else "can be written by other users"
            raise UserError(
                f"the cache {path} {reason}, who could put {files} there that you then use; "
                f"name a folder of your own in HYPERMLP_CACHE, or run: chmod go-w {path}"
            )
