"""Many cells: what is recorded already is not run again.

A record is written as soon as its cell is done, by the process that asked for it, so whatever is interrupted loses the running
cells at most.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hypermlp.layers import build_mixer
from hypermlp.mad.backbones import MakeMixer, make_any
from hypermlp.mad.protocol import Cell, cells, find_grid
from hypermlp.mad.report import Table, summarize
from hypermlp.mad.tasks import TASKS, find_task
from hypermlp.mad.training import cell_dict, run_cell
from hypermlp.mad.workers import Cluster, Local, Results, Tell, resolve_mixer
from hypermlp.records import new_record, read_record, write_record

KIND = "mad"


def check_mixer(name: str, wanted: Iterable[Cell]) -> None:
    """Builds it once for each length, so that what is wrong is said before anything is trained."""
    made = resolve_mixer(name)
    for width, length in _sizes(wanted):
        if made is not None:
            make_any(made, width, length)
        else:
            with torch.device("meta"):
                build_mixer(name, hidden_size=width, max_length=length)


def _sizes(wanted: Iterable[Cell]) -> list[tuple[int, int]]:
    """Widths and lengths that occur."""
    return sorted({(cell.width, find_task(cell.task).settings(**cell.settings).seq_len) for cell in wanted})


def record_path(folder: Path, cell: Cell) -> Path:
    digest = hashlib.sha256(json.dumps(cell_dict(cell), sort_keys=True).encode()).hexdigest()[:12]
    return folder / cell.task / f"{re.sub(r'[^A-Za-z0-9.!-]', '_', cell.mixer)}-{digest}.json"


def recorded(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """The result of a cell that was run, if everything that defines it is equal."""
    path = record_path(folder, cell)
    if not path.is_file():
        return None
    record = read_record(path, KIND)
    same = record["settings"] == json.loads(json.dumps(cell_dict(cell)))
    results: dict[str, Any] = record["results"]
    return results if same else None


def run_cells(wanted: list[Cell], folder: Path, where: Local | Cluster, *, tell: Tell) -> Results:
    """Every cell with its result: first those that are recorded, then the others as they get done."""
    for mixer in sorted({cell.mixer for cell in wanted}):
        check_mixer(mixer, [cell for cell in wanted if cell.mixer == mixer])
    missing = []
    for cell in wanted:
        result = recorded(folder, cell)
        if result is None:
            missing.append(cell)
        else:
            yield cell, result
    for cell, result in where.run(missing, tell):
        write_record(record_path(folder, cell), new_record(KIND, cell_dict(cell), result))
        yield cell, result


def benchmark(make_mixer: MakeMixer, *, grid: str = "mini", tasks: list[str] | None = None, tell: Tell | None = None) -> Table:
    """A module of one's own: ``make_mixer(hidden_size=..., max_length=...)`` returns a causal ``[B, T, D] -> [B, T, D]``.

    Runs here, one cell after the other; ``print`` the result.

    Example::

        print(mad.benchmark(lambda hidden_size, max_length: MyMixer(hidden_size), grid="smoke"))
    """
    name = getattr(make_mixer, "__name__", type(make_mixer).__name__)
    wanted = list(cells(name, find_grid(grid), tasks or list(TASKS)))
    for width, length in _sizes(wanted):
        make_any(make_mixer, width, length)
    return summarize((cell, run_cell(cell, mixer=make_mixer, tell=tell and partial(tell, cell))) for cell in wanted)
