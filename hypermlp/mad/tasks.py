"""The tasks, token by token: pure functions of (settings, random generator).

One NumPy generator makes the training set and goes on into the test set, drawing in a fixed order, so that the same seed gives
the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # a target that counts for nothing
SEED = 12345
Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One setting of a task; the defaults of ``TASKS`` are the benchmark's baseline."""

    vocab_size: int
    """Tokens, noise and special ones included."""
    seq_len: int
    """Length of a sequence before it is cut into input and target."""
    num_train: int = 12_800
    """Training examples."""
    num_test: int = 1_280
    """Test examples."""
    frac_noise: float = 0.0
    """Share of slots that hold noise instead of a key and its value."""
    noise_vocab_size: int = 0
    """Tokens that only ever are noise."""

    def __post_init__(self) -> None:
        content = self.vocab_size - self.noise_vocab_size
        if content < 2 or self.noise_vocab_size < 0:
            raise ValueError(f"vocab_size is {self.vocab_size} with {self.noise_vocab_size} for noise; two tokens must be left at least")
        if self.seq_len < 4 or self.seq_len % 2:
            raise ValueError(f"seq_len is {self.seq_len}; it must be even and at least 4")
        if self.num_train < 0 or self.num_test < 0:
            raise ValueError(f"num_train is {self.num_train}, num_test {self.num_test}; they must be 0 or more")
        if not 0 <= self.frac_noise < 1 or (self.frac_noise > 0 and self.noise_vocab_size == 0):
            raise ValueError(f"frac_noise is {self.frac_noise}; it must be 0 or more, below 1, and 0 without noise_vocab_size")


class Example(NamedTuple):
    inputs: Tokens
    targets: Tokens


def recall(settings: Settings, rng: np.random.Generator, test: bool) -> Example:
    """In-context recall: keys with their values, again and again; a key that was there before tells its value.

    Slots of two tokens, a key and its value, drawn anew when the key is new. The last slot has a key that was there. In training
    every next token is a target; in the test only values of keys seen before.

        built          1 14 | 2 9 | 1 14 | 2 9
        input          1 14 2 9 1 14 2
        train target   14 2 9 1 14 2 9
        test target    -  -  - - 14 - 9

    With ``frac_noise`` a slot other than a protected one may hold two tokens of noise instead.
    """
    content = settings.vocab_size - settings.noise_vocab_size
    keys, values, noise = np.arange(content // 2), np.arange(content // 2, content), np.arange(content, settings.vocab_size)
    slots = settings.seq_len // 2
    protected = rng.choice(slots)  # drawn even where there is no noise
    value_of: dict[int, int] = {}
    tokens: list[int] = []
    answers: list[int] = []
    for slot in range(slots - 1):
        if settings.frac_noise > 0 and slot != protected and rng.random() < settings.frac_noise:
            tokens += rng.choice(noise, size=2).tolist()
            answers += [IGNORED, IGNORED]
            continue
        key = int(rng.choice(keys))
        known = key in value_of
        if not known:
            value_of[key] = int(rng.choice(values))
        tokens += [key, value_of[key]]
        answers += [IGNORED, value_of[key] if known else IGNORED]
    key = int(rng.choice(list(value_of)))
    tokens += [key, value_of[key]]
    answers += [IGNORED, value_of[key]]
    return Example(np.array(tokens[:-1]), np.array((answers if test else tokens)[1:]))


@dataclass(frozen=True)
class Task:
    make: Callable[[Settings, np.random.Generator, bool], Example]
    baseline: Settings


TASKS = {
    "in-context-recall": Task(recall, Settings(vocab_size=16, seq_len=128)),
}


def generate(task: str, *, split: str = "train", seed: int = SEED, **settings: Any) -> Example:
    """Inputs and targets, int64 ``[examples, positions]``; ``settings`` change the baseline, as in ``Settings``.

    Example::

        inputs, targets = mad.generate("in-context-recall", split="test", vocab_size=32)
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; allowed: {', '.join(TASKS)}")
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; allowed: 'train', 'test'")
    chosen = TASKS[task].baseline
    unknown = sorted(set(settings) - set(vars(chosen)))
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}; allowed: {', '.join(vars(chosen))}")
    chosen = replace(chosen, **settings)
    rng = np.random.default_rng(seed)
    examples = [TASKS[task].make(chosen, rng, False) for _ in range(chosen.num_train)]
    if split == "test":  # goes on where the training set ended
        examples = [TASKS[task].make(chosen, rng, True) for _ in range(chosen.num_test)]
    if not examples:
        raise ValueError(f"num_{split} is 0; it must be positive to generate the {split} split")
    return Example(np.stack([example.inputs for example in examples]), np.stack([example.targets for example in examples]))
