"""Write files that are complete or absent."""

import os
import secrets
import tempfile
from pathlib import Path

from hypermlp.errors import UserError


def check_writable(path: str | Path) -> None:
    """Raise if a file cannot be written at ``path``; call it before long work."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part").close()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one. Missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}.part")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
