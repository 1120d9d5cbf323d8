"""Whether other processes use the machine: timings beside them are not fit for publication."""

import os
import sys
import time
from pathlib import Path

from hypermlp.errors import UserError

LIMIT = 0.1  # of a core
SECONDS = 1.0


def busy_processes(seconds: float = SECONDS, limit: float = LIMIT) -> dict[str, float]:
    """Return the other processes that use more than ``limit`` of a core, as "name (pid)" to its share.

    This process and its descendants do not count. Where there is no /proc, there are none.
    """
    before, began = _ticks(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = _ticks(), time.monotonic() - began
    ours = _descendants({pid: parent for pid, (_, parent, _) in after.items()})
    shares = {
        f"{name} ({pid})": (ticks - before[pid][2]) / os.sysconf("SC_CLK_TCK") / elapsed
        for pid, (name, _, ticks) in after.items()
        if pid in before and pid not in ours
    }
    return {name: share for name, share in shares.items() if share > limit}


def check_idle(*, record: bool) -> None:
    """Raise UserError if another process uses the machine and a record is wanted; warn if it is not."""
    busy = busy_processes()
    if not busy:
        return
    names = ", ".join(f"{name}: {share:.0%} of a core" for name, share in busy.items())
    if record:
        raise UserError(
            f"other processes use the machine ({names}), so the timings would not be fit for a record; "
            "stop them, or leave out --json"
        )
    print(
        f"warning: other processes use the machine ({names}); do not trust these timings",
        file=sys.stderr,
        flush=True,
    )


def _ticks() -> dict[int, tuple[str, int, int]]:
    """Return the name, the parent and the processor time in clock ticks of every process."""
    ticks = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:  # the process has ended
            continue
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        ticks[int(file.parent.name)] = name, int(fields[1]), int(fields[11]) + int(fields[12])
    return ticks


def _descendants(parents: dict[int, int]) -> set[int]:
    pids = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids
