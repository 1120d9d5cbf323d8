"""The six tasks by name, with the benchmark's baseline settings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypermlp.config import require
from hypermlp.errors import UserError
from hypermlp.mad import published, samplers
from hypermlp.mad.published import Example, Generators
from hypermlp.mad.settings import Settings, check_copying, check_motifs, check_pairs, whole

SEED = 12345
SAMPLERS = ("published", "fast")
COMMON = ("vocab_size", "seq_len", "num_train", "num_test")


@dataclass(frozen=True)
class Task:
    """How examples are made, one as published or many at once; the baseline, what may be changed, and what must hold."""

    make: Callable[[Settings, Generators, bool], Example]
    sample: Callable[[Settings, np.random.Generator, int, bool], Example]
    baseline: Settings
    changes: tuple[str, ...] = COMMON
    check: Callable[[Settings], None] | None = None

    def settings(self, **changes: Any) -> Settings:
        unknown = sorted(set(changes) - set(self.changes))
        if unknown:
            raise UserError(f"unknown settings {', '.join(unknown)}; allowed: {', '.join(self.changes)}")
        chosen = replace(self.baseline, **changes)
        if self.check is not None:
            self.check(chosen)
        return chosen


RECALL = Settings(vocab_size=16, seq_len=128)
TASKS = {
    "in-context-recall": Task(published.recall, samplers.recall, RECALL, check=check_pairs),
    "noisy-in-context-recall": Task(
        published.recall,
        samplers.recall,
        replace(RECALL, vocab_size=32, frac_noise=0.2, noise_vocab_size=16),
        (*COMMON, "frac_noise", "noise_vocab_size"),
        check_pairs,
    ),
    "fuzzy-in-context-recall": Task(
        published.fuzzy_recall,
        samplers.fuzzy_recall,
        replace(RECALL, key_motif=3, value_motif=3, specials=1),
        (*COMMON, "key_motif", "value_motif"),
        check_motifs,
    ),
    "memorization": Task(
        published.memorization,
        samplers.memorization,
        Settings(vocab_size=256, seq_len=32, num_train=256, specials=1),
        check=check_pairs,
    ),
    "compression": Task(
        published.compression, samplers.compression, Settings(vocab_size=16, seq_len=32, specials=1)
    ),
    "selective-copying": Task(
        published.selective_copying,
        samplers.selective_copying,
        Settings(vocab_size=16, seq_len=256, copied=16, specials=2),
        (*COMMON, "copied"),
        check_copying,
    ),
}


def find_task(name: str) -> Task:
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"unknown task {name!r}; allowed: {', '.join(TASKS)}")
    return TASKS[name]


def generate(
    task: str, *, split: str = "train", seed: int = SEED, sampler: str = "published", **settings: Any
) -> Example:
    """Inputs and targets, NumPy int64 ``[examples, positions]``; ``settings`` change the baseline, as in ``Settings``.

    ``sampler="published"`` draws as the benchmark does, the test set after the whole training set; "fast" makes other
    examples of the same distribution, in a fraction of the time.

    Example::

        inputs, targets = mad.generate("in-context-recall", split="test", vocab_size=32)
    """
    found = find_task(task)
    for name, value, allowed in (("split", split, ("train", "test")), ("sampler", sampler, SAMPLERS)):
        if value not in allowed:
            raise UserError(f"unknown {name} {value!r}; allowed: {', '.join(map(repr, allowed))}")
    require("seed", seed, whole(seed) and 0 <= seed < 2**32, "a whole number, 0 or more and below 2**32")
    chosen = found.settings(**settings)
    if getattr(chosen, f"num_{split}") == 0:
        raise UserError(f"num_{split} is 0; it must be positive to generate the {split} split")
    test = split == "test"
    if sampler == "fast":
        return _sample(found, chosen, seed, test)
    *_, last = _as_published(found, chosen, seed, test=test)
    return last


def both_splits(task: Task, settings: Settings, seed: int, sampler: str) -> tuple[Example, Example]:
    """The training set and the test set."""
    if sampler == "fast":
        return _sample(task, settings, seed, False), _sample(task, settings, seed, True)
    train, test = _as_published(task, settings, seed, test=True)
    return train, test


def _sample(task: Task, settings: Settings, seed: int, test: bool) -> Example:
    count = settings.num_test if test else settings.num_train
    return task.sample(settings, np.random.default_rng([seed, int(test)]), count, test)


def _as_published(task: Task, settings: Settings, seed: int, *, test: bool) -> Iterator[Example]:
    """The training set, and then the test set if it is wanted: it goes on where the training set ended."""
    generators = Generators.seeded(seed)
    for is_test, count in ((False, settings.num_train), (True, settings.num_test)):
        examples = (
            [task.make(settings, generators, is_test) for _ in range(count)] if test or not is_test else []
        )
        if examples:
            yield Example(
                np.stack([example.inputs for example in examples]),
                np.stack([example.targets for example in examples]),
            )
