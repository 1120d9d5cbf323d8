"""Result records: JSON files with a measurement, its settings, the machine and the time."""

import datetime
import functools
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from hypermlp.errors import UserError
from hypermlp.files import write_text

FORMAT = 1


def machine() -> dict[str, Any]:
    """Return the hardware and the versions that a measurement depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def commit() -> str | None:
    """Return the commit of the checkout that this package is in, marked "-dirty" if files differ from it."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return None


def new_record(kind: str, settings: dict[str, Any], results: Any) -> dict[str, Any]:
    """Return a record of this machine and moment. ``kind`` decides how reports show it."""
    from hypermlp import __version__

    return {
        "format": FORMAT,
        "kind": kind,
        "hypermlp": __version__,
        "commit": commit(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "results": results,
    }


def write_record(path: str | Path, record: dict[str, Any]) -> None:
    """Write a record as indented JSON."""
    write_text(path, json.dumps(record, indent=2) + "\n")


def read_record(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Return the record in a file. ``kind`` is the kind it must have, None for any.

    Raises UserError if the file is no record, or one of another kind.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a record: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f'{path} is not a record: it has no key "format" with the value {FORMAT}')
    missing = [key for key in ("kind", "settings", "results") if key not in record]
    if missing:
        raise UserError(f"{path} is not a record: it has no {' and no '.join(missing)}")
    if kind is not None and record["kind"] != kind:
        raise UserError(f"{path} is a record of kind {record['kind']!r}; expected {kind!r}")
    return record
