"""The six tasks as published: pure functions of (settings, random generators, whether it is a test example).

The order of the random draws and the functions that make them decide the tokens, so nothing here may be
reordered. Some draws are made although their result is not used. In the worked examples, - marks a target
that is not scored.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypermlp.mad.settings import IGNORED, Settings

Tokens = NDArray[np.int64]
Scored = list[tuple[int, int]]  # tokens of a sequence, each with its target in a test or IGNORED
MAP_SEED = 12345  # seed of the map in memorization


class Example(NamedTuple):
    """One example ``[positions]``, or several stacked ones ``[examples, positions]``: inputs and targets."""

    inputs: Tokens
    targets: Tokens


class Generators(NamedTuple):
    """The main NumPy generator, and a legacy one that places the blanks of selective copying."""

    main: np.random.Generator
    legacy: np.random.RandomState


def recall(settings: Settings, rng: Generators, test: bool) -> Example:
    """In-context recall: the sequence repeats keys, and a key always has the same value.

    A slot is two tokens, a key and its value. The value is drawn when the key first occurs. The key of the
    last slot has occurred before. In training every next token is a target, in the test only the values of
    repeated keys.

        built          1 14 | 2 9 | 1 14 | 2 9
        input          1 14 2 9 1 14 2
        train target   14 2 9 1 14 2 9
        test target    -  -  - - 14 - 9

    Keys are the lower half of the tokens, values the upper half. With noise (noisy recall), a slot can hold
    two noise tokens instead; the last slot and one that is chosen at random never do.

        built          1 14 | 17 20 | 1 14
        input          1 14 17 20 1
        test target    -  -  -  - 14
    """
    main, slots = rng.main, settings.seq_len // 2
    protected = main.choice(slots)  # drawn even without noise
    value_of: dict[int, int] = {}
    sequence: Scored = []
    for slot in range(slots - 1):
        if settings.frac_noise > 0 and slot != protected and main.random() < settings.frac_noise:
            sequence += _pair(main.choice(settings.noise, size=2).tolist(), [], scored=False)
            continue
        key = int(main.choice(settings.keys))
        known = key in value_of
        if not known:
            value_of[key] = int(main.choice(settings.values))
        sequence += _pair([key], [value_of[key]], scored=known)
    if not value_of:  # every slot is noise; the published code crashes here
        return recall(settings, rng, test)
    key = int(main.choice(list(value_of)))
    return _next_token(sequence + _pair([key], [value_of[key]], scored=True), test)


def fuzzy_recall(settings: Settings, rng: Generators, test: bool) -> Example:
    """Fuzzy recall: keys and values are motifs of one to three different tokens; test keys always have three.

    The probe is one key with its value. It occurs somewhere in the sequence and again at the end; the rest
    is other pairs, with padding on the left. In the test, the targets are the values of repeated keys,
    including the probe at the end.

        built          15 15 | 2 4, 8 | 1, 12 7 | 2 4, 8        keys 2 4 and 1; 15 is padding
        input          15 15 2 4 8 1 12 7 2 4
        train target   15 2 4 8 1 12 7 2 4 8
        test target    -  - - - - - -  - - 8                  (with keys of three tokens)
    """
    main, longest_key, longest_value = rng.main, settings.key_motif, settings.value_motif
    key_sizes = [longest_key] if test else list(range(1, longest_key + 1))
    value_sizes = list(range(1, longest_value + 1))
    key_motifs = {size: _shuffled_motifs(settings.keys, size, main) for size in key_sizes}
    value_motifs = {size: _shuffled_motifs(settings.values, size, main) for size in value_sizes}

    def pick(options: list[Any]) -> Any:
        return options[main.choice(len(options))]

    def sizes() -> tuple[int, int]:
        """Draw the size of a key, without a draw in the test, and of a value."""
        return longest_key if test else pick(key_sizes), pick(value_sizes)

    key_size, value_size = sizes()
    probe, answer = pick(key_motifs[key_size]), pick(value_motifs[value_size])
    pair = key_size + value_size
    insertion = main.choice(settings.seq_len - 2 * pair)
    value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    sequence: Scored = []
    while len(sequence) < settings.seq_len - pair - longest_key - longest_value:
        key_size, value_size = sizes()
        due = len(sequence) >= insertion and probe not in value_of
        key = probe if due else pick(key_motifs[key_size])
        known = key in value_of
        if not known:
            value_of[key] = answer if key == probe else pick(value_motifs[value_size])
        sequence += _pair(key, value_of[key], scored=known)
    padding = [(settings.pad, IGNORED)] * (settings.seq_len + 1 - len(sequence) - pair)
    return _next_token(padding + sequence + _pair(probe, answer, scored=True), test)


def memorization(settings: Settings, rng: Generators, test: bool) -> Example:
    """Memorization: the map from keys to values is fixed and not in the input, so the weights must store it.

    map            115 -> 201, 4 -> 130      255 asks for the value
    input          115 255 4 255
    target         -   201 - 130
    """
    keys, _ = memorized_map(settings.vocab_size)
    slots = settings.seq_len // 2
    rng.main.choice(slots)  # drawn and not used
    return ask(settings, np.array([keys[rng.main.choice(len(keys))] for _ in range(slots)]))


def compression(settings: Settings, rng: Generators, test: bool) -> Example:
    """Compression: random tokens and an instruction; a decoder rebuilds all of them from the last position.

    input          10 3 11 4 15               15 is the instruction
    target         10 3 11 4 15
    """
    tokens = np.append(rng.main.choice(settings.content, size=settings.seq_len - 1), settings.vocab_size - 1)
    return Example(tokens, tokens.copy())


def selective_copying(settings: Settings, rng: Generators, test: bool) -> Example:
    """Selective copying: after the instruction, repeat the content in order, without the blanks between.

    input          14 14 9 14 3 15 14 14      14 is blank, 15 the instruction
    target         -  -  - -  - -  9  3
    """
    count = settings.copied
    content = rng.main.choice(settings.content, size=count)
    blanks = settings.seq_len - 2 * count - 1
    scattered = np.insert(content, rng.legacy.randint(0, count, blanks), settings.blank)
    inputs = np.concatenate([scattered, [settings.vocab_size - 1], np.full(count, settings.blank)])
    return Example(inputs, np.concatenate([np.full(settings.seq_len - count, IGNORED), content]))


def _pair(key: Sequence[int], value: Sequence[int], *, scored: bool) -> Scored:
    """Return the tokens of a key and its value; those of the value are test targets if ``scored``."""
    return [(token, IGNORED) for token in key] + [(token, token if scored else IGNORED) for token in value]


def _next_token(sequence: Scored, test: bool) -> Example:
    """Return an example whose targets are the next test targets in a test, the next tokens in training."""
    tokens, answers = np.array(sequence).T
    return Example(tokens[:-1], (answers if test else tokens)[1:])


def _shuffled_motifs(tokens: Tokens, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return all motifs of a size, shuffled from lexicographic order.

    Listing them all is slow, but the stream of random numbers depends on it.
    """
    motifs = list(itertools.permutations(tokens.tolist(), size))
    rng.shuffle(motifs)
    return motifs


@lru_cache
def memorized_map(vocab_size: int) -> tuple[Tokens, Tokens]:
    """Return the keys in shuffled order, and an array with the value of each key."""
    half, rng = (vocab_size - 1) // 2, np.random.default_rng(MAP_SEED)
    keys, values = np.arange(half), np.arange(half, vocab_size - 1)
    rng.shuffle(keys)
    rng.shuffle(values)
    value_of = np.zeros(half, dtype=np.int64)
    value_of[keys] = values[:half]  # with an odd number of content tokens, one value is not used
    return keys, value_of


def ask(settings: Settings, keys: Tokens) -> Example:
    """Return the example of memorization that asks for the values of ``keys`` ``[..., slots]``."""
    inputs = np.full((*keys.shape[:-1], 2 * keys.shape[-1]), settings.vocab_size - 1)
    targets = np.full_like(inputs, IGNORED)
    inputs[..., ::2], targets[..., 1::2] = keys, memorized_map(settings.vocab_size)[1][keys]
    return Example(inputs, targets)
