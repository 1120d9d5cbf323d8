"""The six tasks as published, draw by draw: pure functions of (settings, random generators, is it a test?).

What is drawn, in which order and by which call decides the tokens, so nothing here may be reordered; some draws are not even used.
"""

import itertools
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hypermlp.mad.settings import IGNORED, Settings

Tokens = NDArray[np.int64]
MAP_SEED = 12345  # of memorization's map


class Example(NamedTuple):
    inputs: Tokens
    targets: Tokens


class Generators(NamedTuple):
    """One NumPy generator for everything, and a legacy one for the blanks of selective copying."""

    main: np.random.Generator
    legacy: np.random.RandomState

    @classmethod
    def seeded(cls, seed: int) -> Self:
        return cls(np.random.default_rng(seed), np.random.RandomState(seed))


def recall(settings: Settings, rng: Generators, test: bool) -> Example:
    """In-context recall: keys with their values, again and again; a key that was there before tells its value.

    Slots of two tokens, a key and its value, drawn anew when the key is new. The last slot has a key that was there. In training
    every next token is a target; in the test only values of keys seen before.

        built          1 14 | 2 9 | 1 14 | 2 9
        input          1 14 2 9 1 14 2
        train target   14 2 9 1 14 2 9
        test target    -  -  - - 14 - 9

    Keys are the lower half of the tokens, values the upper. With noise (noisy recall) each slot, but for the last and one that is
    chosen at random, may hold two tokens of noise instead:

        built          1 14 | 17 20 | 1 14
        input          1 14 17 20 1
        test target    -  -  -  - 14
    """
    main, slots = rng.main, settings.seq_len // 2
    protected = main.choice(slots)  # drawn even where there is no noise
    value_of: dict[int, int] = {}
    tokens: list[int] = []
    answers: list[int] = []
    for slot in range(slots - 1):
        if settings.frac_noise > 0 and slot != protected and main.random() < settings.frac_noise:
            tokens += main.choice(settings.noise, size=2).tolist()
            answers += [IGNORED, IGNORED]
            continue
        key = int(main.choice(settings.keys))
        known = key in value_of
        if not known:
            value_of[key] = int(main.choice(settings.values))
        tokens += [key, value_of[key]]
        answers += [IGNORED, value_of[key] if known else IGNORED]
    if not value_of:  # all noise, which the published code does not survive
        return recall(settings, rng, test)
    key = int(main.choice(list(value_of)))
    tokens += [key, value_of[key]]
    answers += [IGNORED, value_of[key]]
    return _shifted(tokens, answers if test else tokens)


def fuzzy_recall(settings: Settings, rng: Generators, test: bool) -> Example:
    """Fuzzy recall: keys and values are motifs of one to three different tokens, in the test keys of exactly three.

    A probe, one key with its value, is put somewhere and asked for at the end; the rest is other pairs, and padding on the left.
    In the test every value is a target whose key was there before, the probe's at the end among them.

        built          15 15 | 2 4, 8 | 1, 12 7 | 2 4, 8        keys 2 4 and 1; 15 is padding
        input          15 15 2 4 8 1 12 7 2 4
        train target   15 2 4 8 1 12 7 2 4 8
        test target    -  - - - - - -  - - 8                  (there keys have three tokens)
    """
    main, longest_key, longest_value = rng.main, settings.key_motif, settings.value_motif
    key_sizes = [longest_key] if test else list(range(1, longest_key + 1))
    value_sizes = list(range(1, longest_value + 1))
    key_motifs = {size: _shuffled_motifs(settings.keys, size, main) for size in key_sizes}
    value_motifs = {size: _shuffled_motifs(settings.values, size, main) for size in value_sizes}

    def size_of_key() -> int:
        return longest_key if test else key_sizes[main.choice(len(key_sizes))]

    def size_of_value() -> int:
        return value_sizes[main.choice(len(value_sizes))]

    def motif(motifs: list[tuple[int, ...]]) -> tuple[int, ...]:
        return motifs[main.choice(len(motifs))]

    key_size, value_size = size_of_key(), size_of_value()
    probe, answer = motif(key_motifs[key_size]), motif(value_motifs[value_size])
    pair = key_size + value_size
    insertion = main.choice(settings.seq_len - 2 * pair)
    value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    tokens: list[int] = []
    answers: list[int] = []
    while len(tokens) < settings.seq_len - pair - longest_key - longest_value:
        key_size, value_size = size_of_key(), size_of_value()
        due = len(tokens) >= insertion and probe not in value_of
        key = probe if due else motif(key_motifs[key_size])
        known = key in value_of
        if not known:
            value_of[key] = answer if key == probe else motif(value_motifs[value_size])
        value = value_of[key]
        tokens += [*key, *value]
        answers += [IGNORED] * len(key) + (list(value) if known else [IGNORED] * len(value))
    padding = settings.seq_len + 1 - len(tokens) - pair
    tokens = [settings.pad] * padding + tokens + [*probe, *answer]
    answers = [IGNORED] * padding + answers + [IGNORED] * len(probe) + list(answer)
    return _shifted(tokens, answers if test else tokens)


def memorization(settings: Settings, rng: Generators, test: bool) -> Example:
    """Memorization: a map from keys to values that never changes and is nowhere in the input; it must be in the weights.

    map            115 -> 201, 4 -> 130      255 asks
    input          115 255 4 255
    target         -   201 - 130
    """
    keys, value_of = _memorized_map(settings.vocab_size)
    slots = settings.seq_len // 2
    rng.main.choice(slots)  # drawn and not used
    chosen = np.array([keys[rng.main.choice(len(keys))] for _ in range(slots)])
    inputs, targets = np.full(2 * slots, settings.vocab_size - 1), np.full(2 * slots, IGNORED)
    inputs[::2], targets[1::2] = chosen, value_of[chosen]
    return Example(inputs, targets)


def compression(settings: Settings, rng: Generators, test: bool) -> Example:
    """Compression: random tokens and a sign to compress them; a decoder must rebuild all from the last position.

    input          10 3 11 4 15               15 says: compress
    target         10 3 11 4 15
    """
    tokens = np.append(rng.main.choice(settings.content, size=settings.seq_len - 1), settings.vocab_size - 1)
    return Example(tokens, tokens.copy())


def selective_copying(settings: Settings, rng: Generators, test: bool) -> Example:
    """Selective copying: content scattered among blanks; after the sign to copy it must come again, in order, without blanks.

    input          14 14 9 14 3 15 14 14      14 is blank, 15 says: copy
    target         -  -  - -  - -  9  3
    """
    count = settings.copied
    content = rng.main.choice(settings.content, size=count)
    blanks = settings.seq_len - 2 * count - 1
    scattered = np.insert(content, rng.legacy.randint(0, count, blanks), settings.blank)
    inputs = np.concatenate([scattered, [settings.vocab_size - 1], np.full(count, settings.blank)])
    return Example(inputs, np.concatenate([np.full(settings.seq_len - count, IGNORED), content]))


def _shifted(tokens: list[int], answers: list[int]) -> Example:
    return Example(np.array(tokens[:-1]), np.array(answers[1:]))


def _shuffled_motifs(tokens: Tokens, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """All of a size, in lexicographic order and then shuffled: slow, and the stream of random numbers depends on it."""
    motifs = list(itertools.permutations(tokens.tolist(), size))
    rng.shuffle(motifs)
    return motifs


@lru_cache
def _memorized_map(vocab_size: int) -> tuple[list[int], Tokens]:
    """Keys in shuffled order, and the value of each; the last token asks."""
    content = vocab_size - 1
    rng = np.random.default_rng(MAP_SEED)
    keys, values = [(k,) for k in range(content // 2)], [(v,) for v in range(content // 2, content)]
    rng.shuffle(keys)
    rng.shuffle(values)
    value_of = np.zeros(content // 2, dtype=np.int64)
    for (key,), (value,) in zip(keys, values, strict=False):  # one value may be left over
        value_of[key] = value
    return [key for (key,) in keys], value_of
