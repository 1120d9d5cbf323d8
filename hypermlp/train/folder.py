"""The folder of a run: one process writes to it at a time, and a resumed run keeps its recipe and data."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hypermlp.errors import UserError
from hypermlp.files import write_text
from hypermlp.sealed import remove_unfinished, restore_all
from hypermlp.train.building import build
from hypermlp.train.recipe import Recipe

SECTIONS = ("model", "data", "training")
FREE_ON_RESUME = {  # keys that do not change what is trained: length, frequencies, batching, storage
    "steps", "eval_every", "eval_sequences", "save_every", "keep", "log_every", "report_to", "explosion",
    "micro_batch", "sharding", "cache",
}  # fmt: skip


class BusyError(UserError):
    """Another process is training in the folder."""


class RunFolder:
    """A run's folder. ``recipe.json`` in it records the recipe and data that the run began with."""

    def __init__(self, path: Path):
        self.path, self.record = path, path / "recipe.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder until the context ends, or the process does, even if it is killed.

        A folder that did not exist before is removed again if nothing was written to it.
        """
        new, lock = not self.path.exists(), FileLock(self.path / ".lock", blocking=False)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout as error:
            raise BusyError(
                f"another process is training in {self.path}; wait for it to end, or use another --out"
            ) from error
        try:
            restore_all(self.path)
            yield
        finally:
            if new and [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
            lock.release()

    def beginning(self) -> dict[str, Any]:
        """Return the content of recipe.json; empty if the run has not begun."""
        try:
            content = json.loads(self.record.read_text())
            sections = {section: dict(content[section]) for section in SECTIONS}
            return {**content, "name": str(content["name"]), **sections}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.record} is damaged; it should hold the recipe that this run began with. "
                "Remove it to resume without checking the recipe"
            ) from error

    def recipe(self) -> Recipe | None:
        """Return the recipe that the run began with; None if it has not begun.

        A key that recipe.json lacks, because it was added later, has its default.
        """
        content = self.beginning()
        return build(Recipe, {key: content[key] for key in ("name", *SECTIONS)}, "") if content else None

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise if a resumed run would change a setting that it must keep."""
        began = self.recipe()
        if began is None:
            return
        before, content = began.settings(), recipe.settings()
        for key in sorted(before.keys() | content.keys()):
            old, new = before.get(key), content.get(key)
            if old != new and key.partition(".")[2] not in FREE_ON_RESUME:
                kept = "null" if old is None else old
                raise UserError(
                    f"{key} is {new!r}, but the run in {self.path} has {old!r}; "
                    f"add --set {key}={kept}, or begin a new run with --init-from"
                )

    def check_data(self, digest: str) -> None:
        """Raise if the prepared data, identified by ``digest``, is not what the run began with."""
        if self.beginning().get("data_digest", digest) != digest:
            raise UserError(
                f"the data is not what the run in {self.path} began with: source or tokenizer have changed; "
                "restore them, or begin a new run with --init-from"
            )

    def begin(self, recipe: Recipe, data_digest: str, init_from: str | None) -> None:
        """Record what the run begins or continues with, and remove unfinished checkpoints."""
        remove_unfinished(self.path)
        content = {**recipe.to_dict(), "data_digest": data_digest, "init_from": init_from}
        write_text(self.record, json.dumps(content, indent=2) + "\n")
