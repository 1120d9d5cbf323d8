"""The six tasks by name, with the benchmark's baseline settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypermlp.errors import UserError
from hypermlp.mad import published, samplers
from hypermlp.mad.published import Example, Generators
from hypermlp.mad.settings import Settings, check_copying, check_motifs, check_pairs, check_seed
from hypermlp.validation import find_option, require

SEED = 12345
SAMPLERS = ("published", "fast")
COMMON = ("vocab_size", "seq_len", "num_train", "num_test")


@dataclass(frozen=True)
class Task:
    """One task: its two samplers, its default settings and what users can change. ``TASKS`` holds all six.

    Attributes:
        make: draws one example as published, from (settings, generators, whether it is a test example).
        sample: draws many examples at once, from (settings, generator, count, whether they are test
            examples).
        baseline: the benchmark's own settings (MAD calls them its baseline), the default.
        changes: names of the settings that users can change.
        check: raises if settings do not fit this task; None if all do.
    """

    make: Callable[[Settings, Generators, bool], Example]
    sample: Callable[[Settings, np.random.Generator, int, bool], Example]
    baseline: Settings
    changes: tuple[str, ...] = COMMON
    check: Callable[[Settings], None] | None = None

    def settings(self, **changes: Any) -> Settings:
        """Return the default settings with ``changes`` (name=value, for names in the attribute ``changes``).

        Raises:
            UserError: for an unknown name or a value that does not fit the task.
        """
        unknown = sorted(set(changes) - set(self.changes))
        if unknown:
            raise UserError(f"unknown settings {', '.join(unknown)}; allowed: {', '.join(self.changes)}")
        chosen = replace(self.baseline, **changes)
        if self.check is not None:
            self.check(chosen)
        return chosen

    def draw(self, settings: Settings, seed: int, sampler: str, *splits: str) -> list[Example]:
        """Return an ``Example`` for each of ``splits`` ("train", "test"), with all its examples stacked.

        The published test set continues the random stream of the training set, so the training set is always
        drawn first. The fast sampler has one stream per split. ``generate`` documents ``seed`` and
        ``sampler``.
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
    """Return the inputs and targets of a task, NumPy int64 ``[examples, positions]`` each.

    Args:
        task: "in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall", "memorization",
            "compression" or "selective-copying".
        split: "train" (the default) or "test".
        seed: seed of the random numbers, 0 to 2**32 - 1 (12345, which the benchmark uses).
        sampler: "published" (the default) returns token for token the examples of the benchmark's own code.
            It draws the whole training set before the test set, so num_train changes the test set. "fast"
            draws other examples of the same distribution in a fraction of the time.
        settings: changes of the task's default settings. Every task has vocab_size (all token ids, noise and
            special tokens included), seq_len, num_train and num_test (numbers of examples). Noisy recall has
            frac_noise (share of noise, 0 or more and below 1) and noise_vocab_size (number of noise tokens),
            fuzzy recall has key_motif and value_motif (most tokens of a key and of a value), selective
            copying has copied (tokens to copy). seq_len must be even for in-context recall, noisy recall and
            memorization. ``TASKS[task].baseline`` shows the defaults.

    Returns:
        an ``Example``, a named tuple of ``inputs`` and ``targets``. There are seq_len positions, or seq_len -
        1 for in-context and noisy recall, whose inputs and targets are one sequence, shifted. Except for
        compression, ``targets[i, t]`` is what the model must output at position t, so it needs no further
        shift; -100 (``IGNORED``) is not scored. The three in-context recall tasks score every next token in
        training, only values of repeated keys in the test. For compression, the targets equal the inputs, and
        all of them must be decoded from the model's output at the last position alone, as the benchmark does.

    Raises:
        UserError: for an unknown name, or a value that is not allowed.

    Example::

        from hypermlp import mad

        inputs, targets = mad.generate("in-context-recall", split="test", num_train=100, num_test=10)
        assert inputs.shape == targets.shape == (10, 127)
        scored = targets != mad.IGNORED
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
