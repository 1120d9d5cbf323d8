"""The six tasks by name, with the benchmark's baseline settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypermlp.config import find_option, require
from hypermlp.errors import UserError
from hypermlp.mad import published, samplers
from hypermlp.mad.published import Example, Generators
from hypermlp.mad.settings import Settings, check_copying, check_motifs, check_pairs, check_seed

SEED = 12345
SAMPLERS = ("published", "fast")
COMMON = ("vocab_size", "seq_len", "num_train", "num_test")


@dataclass(frozen=True)
class Task:
    """One task: its two samplers, its baseline settings and what users can change."""

    make: Callable[[Settings, Generators, bool], Example]
    """Draws one example as published, from (settings, generators, whether it is a test example)."""
    sample: Callable[[Settings, np.random.Generator, int, bool], Example]
    """Draws many examples at once, from (settings, generator, count, whether they are test examples)."""
    baseline: Settings
    """The benchmark's own settings."""
    changes: tuple[str, ...] = COMMON
    """Settings that users can change."""
    check: Callable[[Settings], None] | None = None
    """Raises if settings do not fit this task."""

    def settings(self, **changes: Any) -> Settings:
        """Return the baseline settings with ``changes``, checked."""
        unknown = sorted(set(changes) - set(self.changes))
        if unknown:
            raise UserError(f"unknown settings {', '.join(unknown)}; allowed: {', '.join(self.changes)}")
        chosen = replace(self.baseline, **changes)
        if self.check is not None:
            self.check(chosen)
        return chosen

    def draw(self, settings: Settings, seed: int, sampler: str, *splits: str) -> list[Example]:
        """Return the named splits, each with all its examples stacked.

        The published test set continues the random stream of the training set, so the training set is
        always drawn first. The fast sampler has one stream per split.
        """
        counts = {"train": settings.num_train, "test": settings.num_test}
        if sampler == "fast":
            streams = {split: np.random.default_rng([seed, int(split == "test")]) for split in splits}
            return [
                self.sample(settings, stream, counts[split], split == "test")
                for split, stream in streams.items()
            ]
        generators = Generators(np.random.default_rng(seed), np.random.RandomState(seed))
        drawn = {
            split: [self.make(settings, generators, split == "test") for _ in range(count)]
            for split, count in counts.items()
            if split == "train" or split in splits
        }
        return [Example(*map(np.stack, zip(*drawn[split], strict=True))) for split in splits]


TASKS = {
    "in-context-recall": Task(
        published.recall,
        samplers.recall,
        Settings(vocab_size=16, seq_len=128),
        check=check_pairs,
    ),
    "noisy-in-context-recall": Task(
        published.recall,
        samplers.recall,
        Settings(vocab_size=32, seq_len=128, frac_noise=0.2, noise_vocab_size=16),
        changes=(*COMMON, "frac_noise", "noise_vocab_size"),
        check=check_pairs,
    ),
    "fuzzy-in-context-recall": Task(
        published.fuzzy_recall,
        samplers.fuzzy_recall,
        Settings(vocab_size=16, seq_len=128, key_motif=3, value_motif=3, specials=1),
        changes=(*COMMON, "key_motif", "value_motif"),
        check=check_motifs,
    ),
    "memorization": Task(
        published.memorization,
        samplers.memorization,
        Settings(vocab_size=256, seq_len=32, num_train=256, specials=1),
        check=check_pairs,
    ),
    "compression": Task(
        published.compression,
        samplers.compression,
        Settings(vocab_size=16, seq_len=32, specials=1),
    ),
    "selective-copying": Task(
        published.selective_copying,
        samplers.selective_copying,
        Settings(vocab_size=16, seq_len=256, copied=16, specials=2),
        changes=(*COMMON, "copied"),
        check=check_copying,
    ),
}


def find_task(name: str) -> Task:
    return find_option("task", name, TASKS)


def generate(
    task: str, *, split: str = "train", seed: int = SEED, sampler: str = "published", **settings: Any
) -> Example:
    """Return the inputs and targets of a task, NumPy int64 ``[examples, positions]``.

    ``settings`` change the task's baseline; their names are fields of ``Settings``. ``split`` is "train" or
    "test". ``sampler="published"`` reproduces the benchmark's own examples, with the test set drawn after
    the whole training set; "fast" draws other examples of the same distribution in a fraction of the time.

    Example::

        inputs, targets = mad.generate("in-context-recall", split="test", vocab_size=32)
    """
    found = find_task(task)
    require("split", split, split in ("train", "test"), "'train' or 'test'")
    require("sampler", sampler, sampler in SAMPLERS, " or ".join(map(repr, SAMPLERS)))
    check_seed(seed)
    chosen = found.settings(**settings)
    count = f"num_{split}"
    require(
        count, getattr(chosen, count), getattr(chosen, count) > 0, f"positive to generate the {split} split"
    )
    return found.draw(chosen, seed, sampler, split)[0]
