"""The folder of a run: one process writes to it at a time, and a run goes on as it began."""

import json
from pathlib import Path
from typing import Any

from hypermlp.errors import UserError
from hypermlp.train import checkpoints
from hypermlp.train.recipe import Recipe

BEGUN, LOCK = "recipe.json", ".lock"
FREE_ON_RESUME = {  # how long, how often, how it is cut up
    "steps", "eval_every", "eval_sequences", "save_every", "keep", "log_every", "report_to", "explosion", "micro_batch", "sharding",
    "cache",
}  # fmt: skip


class BusyError(ValueError):
    """Another process is training there."""


class RunFolder:
    """What the run was begun with lies in recipe.json, beside the checkpoints."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: Any = None

    def lock(self) -> None:
        """Until this process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ImportError:  # a system without it
            return
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115 - open as long as the run
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            raise BusyError(
                f"another process is training in {self.path}; wait for it, or use another --out"
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begun(self) -> dict[str, Any]:
        """Empty if there is nothing yet."""
        path = self.path / BEGUN
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text())
            assert all(isinstance(content[section], dict) for section in ("model", "data", "training"))
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise UserError(
                f"{path} is damaged: it should say what this run was begun with; remove it to go on without"
            ) from error
        return dict(content)

    def check_recipe(self, recipe: Recipe) -> None:
        """Does a resumed run go on with its own recipe?"""
        before, content = self.begun(), recipe.to_dict()
        if not before:
            return
        for section in ("model", "data", "training"):
            for key in sorted(set(before[section]) | set(content[section])):
                old, new = before[section].get(key), content[section].get(key)
                if old != new and key not in FREE_ON_RESUME:
                    raise UserError(
                        f"{section}.{key} is {new!r}, but the run in {self.path} has {old!r}; resume it as it is, or use --init-from"
                    )

    def check_data(self, digest: str) -> None:
        """And with its own data?"""
        if self.begun().get("data_digest", digest) != digest:
            raise UserError(
                f"the data is not what the run in {self.path} was begun with: sources or tokenizer have changed; "
                "bring them back, or begin a new run with --init-from"
            )

    def keep(self, recipe: Recipe, data_digest: str, init_from: str | None) -> None:
        checkpoints.remove_unfinished(self.path)
        content = {**recipe.to_dict(), "data_digest": data_digest, "init_from": init_from}
        aside = self.path / f"{BEGUN}.part"
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(self.path / BEGUN)
