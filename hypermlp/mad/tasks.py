"""The six tasks by name, with the benchmark's baseline settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypermlp.mad import published, samplers
from hypermlp.mad.published import Example, Generators
from hypermlp.mad.settings import Settings, check_copying, check_motifs, check_pairs

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
            raise ValueError(f"unknown settings {', '.join(unknown)}; allowed: {', '.join(self.changes)}")
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
    "compression": Task(published.compression, samplers.compression, Settings(vocab_size=16, seq_len=32, specials=1)),
    "selective-copying": Task(
        published.selective_copying,
        samplers.selective_copying,
        Settings(vocab_size=16, seq_len=256, copied=16, specials=2),
        (*COMMON, "copied"),
        check_copying,
    ),
}


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; allowed: {', '.join(TASKS)}")
    return TASKS[name]


def generate(task: str, *, split: str = "train", seed: int = SEED, sampler: str = "published", **settings: Any) -> Example:
    """Inputs and targets, int64 ``[examples, positions]``; ``settings`` change the baseline, as in ``Settings``.

    ``sampler="published"`` draws as the benchmark does, the test set after the whole training set; "fast" makes other
    examples of the same distribution, in a fraction of the time.

    Example::

        inputs, targets = mad.generate("in-context-recall", split="test", vocab_size=32)
    """
    found = find_task(task)
    for name, value, allowed in (("split", split, ("train", "test")), ("sampler", sampler, SAMPLERS)):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; allowed: {', '.join(map(repr, allowed))}")
    chosen, test = found.settings(**settings), split == "test"
    count = chosen.num_test if test else chosen.num_train
    if count == 0:
        raise ValueError(f"num_{split} is 0; it must be positive to generate the {split} split")
    if sampler == "fast":
        return found.sample(chosen, np.random.default_rng([seed, int(test)]), count, test)
    generators = Generators.seeded(seed)
    examples = [found.make(chosen, generators, False) for _ in range(chosen.num_train)]
    if test:  # goes on where the training set ended
        examples = [found.make(chosen, generators, True) for _ in range(count)]
    return Example(np.stack([example.inputs for example in examples]), np.stack([example.targets for example in examples]))
