"""The benchmark for a module of one's own, and the checks before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from hypermlp.layers import build_mixer
from hypermlp.mad.backbones import MakeMixer, make_any, resolve_mixer
from hypermlp.mad.protocol import Cell, cells, find_grid
from hypermlp.mad.report import Table, summarize
from hypermlp.mad.tasks import TASKS, find_task
from hypermlp.mad.training import run_cell
from hypermlp.workers import Tell


def check_mixers(wanted: list[Cell]) -> None:
    """Builds each once for each length, so that what is wrong is said before anything is trained."""
    for mixer in sorted({cell.mixer for cell in wanted}):
        _check_mixer(mixer, [cell for cell in wanted if cell.mixer == mixer])


def _check_mixer(name: str, wanted: Iterable[Cell]) -> None:
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
