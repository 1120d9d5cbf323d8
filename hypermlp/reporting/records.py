"""The one writer and reader of result records: JSON files that say what was measured, with what, where and when."""

import datetime
import json
import os
import platform
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch

from hypermlp.errors import UserError

FORMAT = 1


def machine() -> dict[str, Any]:
    """Hardware and versions that a number depends on."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "accelerator": accelerator,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def new_record(kind: str, settings: dict[str, Any], results: Any) -> dict[str, Any]:
    from hypermlp import __version__

    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "format": FORMAT,
        "kind": kind,
        "hypermlp": __version__,
        "created": created,
        "machine": machine(),
        "settings": settings,
        "results": results,
    }


def check_writable(path: str | Path) -> None:
    """Before long work: can a record be written there?"""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file for the record")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    os.unlink(aside)


def write_record(path: str | Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Written aside and renamed, so that a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}.part")
    try:
        with open(aside, "xb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_record(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """A record, checked for being one (of this kind)."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a record: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        raise UserError(f"{path} is not a record of format {FORMAT}: its format is {found!r}")
    missing = [key for key in ("kind", "settings", "results") if key not in record]
    if missing:
        raise UserError(f"{path} is not a record: it has no {' and no '.join(missing)}")
    if kind is not None and record["kind"] != kind:
        raise UserError(f"{path} is a record of kind {record['kind']!r}; expected {kind!r}")
    return record
