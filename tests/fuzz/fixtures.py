"""A tiny corpus, recipe, trained run and records, made once for each process of a fuzzer."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from fuzz import isolated
from fuzz.core import Case, Finding, Part

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECIPE = {
    "name": "tiny",
    "model": {"mixer": "G-cg-q-12o", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "rank": 2},
    "training": {
        "steps": 2, "batch_tokens": 64, "micro_batch": 2, "learning_rate": 2e-3, "warmup_steps": 1,
        "eval_every": 2, "eval_sequences": 2, "save_every": 1, "log_every": 1, "report_to": [],
    },
}  # fmt: skip


class Fixtures:
    """Paths of the files; ``run`` is a folder that `hypermlp train` wrote."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.corpus, self.cache = self.folder / "corpus", self.folder / "prepared"
        self.recipe, self.run, self.records = (self.folder / name for name in ("tiny.yaml", "run", "records"))
        if not (self.folder / "made").exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self._make()
            (self.folder / "made").touch()

    def _make(self) -> None:
        self.corpus.mkdir(parents=True)
        for i in range(12):
            words = " ".join(f"{i * j % 97}" for j in range(40))
            (self.corpus / f"{i:02}.txt").write_text(f"document {i}: {words}\n")
        data = {"source": str(self.corpus), "context": 16, "cache": str(self.cache), "validation": 0.2}
        self.recipe.write_text(yaml.safe_dump(RECIPE | {"data": data}))
        done = isolated.run(["train", str(self.recipe), "--out", str(self.run)], self.folder, seconds=300)
        if done.status != 0:
            raise Finding("the fixtures cannot be made", done.err[-2000:])
        self.records.mkdir()
        for path in [*sorted(RESULTS.glob("*.json")), *sorted(RESULTS.glob("mad-recall/**/*.json"))[:3]]:
            if path.stat().st_size < 30_000:
                shutil.copy(path, self.records / path.name)
        assert any("kind" in json.loads(path.read_text()) for path in self.records.iterdir())


class CommandPart(Part):
    """A fuzzer that runs commands in processes of their own, on files that are made once."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._fixtures: Fixtures | None = None

    @property
    def fixtures(self) -> Fixtures:
        if self._fixtures is None:
            self._fixtures = Fixtures(self.folder / "fixtures")
        return self._fixtures

    def check(self, case):
        place = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            return self.check_in(case, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def check_in(self, case: Case, place: Path) -> Counter[str]:
        """Do what ``check`` does, with a folder that is removed afterwards."""
        raise NotImplementedError


def command_problem(name: str, result: isolated.Result, *, refused: bool) -> tuple[str, str] | None:
    """Return the kind and the message of a broken promise of the command line; None if all hold."""
    tail = f"status {result.status}\n{result.out[-600:]}\n{result.err[-1800:]}"
    last = ([line for line in result.err.splitlines() if line.strip()] or [""])[-1]
    if result.status is None:
        return "no end", tail
    if result.status < 0:
        return f"ended by signal {-result.status}", tail
    if result.status == isolated.TRACEBACK or "Traceback (most recent call last)" in result.err:
        return f"traceback, {last.split(':')[0][:60]}", tail
    if result.status not in (0, 2):
        return f"status {result.status}", tail
    if refused and result.status == 0:
        return "an invalid value was accepted", tail
    if result.status == 2 and not last.startswith(f"hypermlp {name}: ") and not last.startswith("hypermlp"):
        return "no message of one line", tail
    return None
