"""The folder for what can be made again: built kernels and prepared data."""

import os
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
