"""Trainings that are ended by signals at random times and resumed until they finish.

The weights at the end must be those of the training that was never ended, bit for bit. A process
cannot react to SIGKILL; after SIGTERM it must save a checkpoint and end with status 0.
"""

import signal
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st

from fuzz import isolated
from fuzz.core import Finding
from fuzz.drawing import record, weighted
from fuzz.fixtures import CommandPart

STEPS = 6


def kills():
    """Draw signals and when they come; after these, the training runs to its end."""
    one = st.tuples(st.floats(0.02, 2.0), weighted(SIGKILL=2, SIGTERM=1)).map(list)
    return record(kills=st.lists(one, min_size=1, max_size=8))


class Kills(CommandPart):
    name = "kills"
    cases = kills
    share = 4
    limit = 600.0
    seconds = 120.0

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._weights: bytes | None = None

    def check_in(self, case, place):
        if self._weights is None:
            self._weights = self._finish(self.folder / "uninterrupted")
        counted: Counter[str] = Counter()
        for seconds, ending in case["kills"]:
            result = self._train(place, seconds, ending)
            finished = (place / "run" / "final" / "complete.json").exists()
            # The handler is gone when the training has ended: the signal then ends a process that is done.
            good = {"SIGKILL": (0, None), "SIGTERM": (0, -signal.SIGTERM) if finished else (0,)}[ending]
            if result.status not in good:
                text = f"{result.out[-600:]}\n{result.err[-1800:]}"
                raise Finding(f"status {result.status} after {ending}", text)
            counted[f"ended by {ending}"] += result.ended
            if finished:
                break
        if self._finish(place) != self._weights:
            raise Finding("a resumed training has other weights", str(case))
        counted["trainings"] += 1
        return counted

    def _train(self, place: Path, seconds: float, ending: str = "SIGKILL") -> isolated.Result:
        words = ["train", str(self.fixtures.recipe), "--out", str(place / "run"), "--resume"]
        words += ["--set", f"training.steps={STEPS}"]
        return isolated.run(words, place / "work", seconds=seconds, ending=getattr(signal, ending))

    def _finish(self, place: Path) -> bytes:
        """Run or resume the training to its end and return the file of weights."""
        result = self._train(place, self.seconds)
        if result.status != 0:
            raise Finding(f"a training cannot be resumed: status {result.status}", result.err[-2500:])
        return (place / "run" / "final" / "model.safetensors").read_bytes()
