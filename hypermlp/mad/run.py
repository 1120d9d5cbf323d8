"""The benchmark in Python, and the checks before anything is trained."""

from functools import partial

from hypermlp.jobs.cells import Teller
from hypermlp.jobs.workers import Tell
from hypermlp.mad import mixers
from hypermlp.mad.protocol import Cell, cells, find_grid
from hypermlp.mad.report import Table, summarize
from hypermlp.mad.tasks import TASKS, find_task
from hypermlp.mad.training import run_cell


def check_mixers(wanted: list[Cell]) -> None:
    """Each one for each width and length that occurs, so that what is wrong is said before anything is trained."""
    for mixer in sorted({cell.mixer for cell in wanted}):
        _check(mixer, mixers.resolve(mixer), [cell for cell in wanted if cell.mixer == mixer])


def _check(name: str, mixer: str | mixers.MakeMixer, wanted: list[Cell]) -> None:
    for width, length in sorted(
        {(cell.width, find_task(cell.task).settings(**cell.settings).seq_len) for cell in wanted}
    ):
        mixers.check(name, mixer, width, length)


def benchmark(
    mixer: str | mixers.MakeMixer,
    *,
    grid: str = "mini",
    tasks: str | list[str] | None = None,
    tell: Tell | None = None,
) -> Table:
    """A label, or a function ``make(hidden_size=..., max_length=...)`` that returns a causal module ``[B, T, D] -> [B, T, D]``.

    Runs here, one cell after the other, and keeps no records; ``print`` the result, or read its ``scores``. ``tell(cell, progress)``
    hears how far it is; by default that goes to stderr.

    Example::

        print(mad.benchmark(lambda hidden_size, max_length: MyMixer(hidden_size), grid="smoke"))
    """
    name = mixer if isinstance(mixer, str) else getattr(mixer, "__name__", type(mixer).__name__)
    chosen = list(TASKS) if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    wanted = list(cells(name, find_grid(grid), chosen))
    _check(name, mixer, wanted)
    tell = tell or Teller(len(wanted)).progress
    return summarize((cell, run_cell(cell, mixer=mixer, tell=partial(tell, cell))) for cell in wanted)
