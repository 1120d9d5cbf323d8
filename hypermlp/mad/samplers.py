"""The six tasks for all examples at once: equal in distribution to the published ones, with random numbers of their own.

Shapes: N examples, S slots, C keys. Every function takes (settings, generator, number of examples, is it a test?).
"""

import numpy as np
from numpy.typing import NDArray

from hypermlp.mad.published import Example, Tokens, _memorized_map
from hypermlp.mad.settings import IGNORED, Settings


def recall(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    slots, keys = settings.seq_len // 2 - 1, len(settings.keys)  # but for the last slot
    rows = np.arange(count)[:, None]
    noisy = rng.random((count, slots)) < settings.frac_noise
    protected = rng.integers(0, slots + 1, count)
    noisy[protected < slots, protected[protected < slots]] = False
    noisy[noisy.all(1), 0] = False  # as good as never: a key must be there
    key = rng.integers(0, keys, (count, slots))
    value_of = settings.values[rng.integers(0, len(settings.values), (count, keys))]
    first = np.full((count, keys), slots)  # slot in which a key is seen first
    for slot in reversed(range(slots)):
        shown = ~noisy[:, slot]
        first[shown, key[shown, slot]] = slot
    last = np.where(first < slots, rng.random((count, keys)), -1.0).argmax(1)  # any of those that were seen
    known = ~noisy & (np.arange(slots) > first[rows, key])
    pairs = np.stack([key, value_of[rows, key]], axis=-1)
    if settings.noise_vocab_size:
        pairs = np.where(noisy[..., None], rng.choice(settings.noise, pairs.shape), pairs)
    answers = np.full_like(pairs, IGNORED)
    answers[..., 1] = np.where(known, pairs[..., 1], IGNORED)
    end = np.stack([last, value_of[rows[:, 0], last]], axis=-1)
    tokens = np.concatenate([pairs.reshape(count, -1), end], axis=1)
    scored = np.concatenate([answers.reshape(count, -1), np.full((count, 1), IGNORED), end[:, 1:]], axis=1)
    return Example(tokens[:, :-1], (scored if test else tokens)[:, 1:])


def fuzzy_recall(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    """Turn by turn, all examples at once; a key is known if it equals one of the turns before."""
    longest_key, longest_value = settings.key_motif, settings.value_motif
    width = longest_key + longest_value

    def draw() -> tuple[Tokens, Tokens]:
        """A key and a value each, padded with -1."""
        key_size = np.full(count, longest_key) if test else rng.integers(1, longest_key + 1, count)
        key = _motifs(settings.keys, longest_key, key_size, rng)
        return key, _motifs(settings.values, longest_value, rng.integers(1, longest_value + 1, count), rng)

    probe, answer = draw()
    pair = (probe >= 0).sum(1) + (answer >= 0).sum(1)
    insertion = rng.integers(0, settings.seq_len - 2 * pair)
    length, placed = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    tokens = np.full((count, settings.seq_len + 1 + width), settings.pad)
    answers = np.full_like(tokens, IGNORED)
    history: list[tuple[Tokens, Tokens]] = []

    def append(key: Tokens, value: Tokens, scored: NDArray[np.bool_], active: NDArray[np.bool_]) -> None:
        nonlocal length
        for part, score in ((key, np.zeros(count, dtype=bool)), (value, scored)):
            for column in part.T:
                who = np.flatnonzero(active & (column >= 0))
                tokens[who, length[who]] = column[who]
                answers[who, length[who]] = np.where(score[who], column[who], IGNORED)
                length[who] += 1

    while (active := length < settings.seq_len - pair - width).any():
        key, value = draw()
        due = (length >= insertion) & ~placed
        key = np.where(due[:, None], probe, key)
        is_probe = (key == probe).all(1)
        value = np.where(is_probe[:, None], answer, value)
        known = np.zeros(count, dtype=bool)
        for old_key, old_value in history:
            same = (old_key == key).all(1)
            known |= same
            value = np.where(same[:, None], old_value, value)
        append(key, value, known, active)
        placed |= is_probe & active
        history.append((np.where(active[:, None], key, -2), value))
    append(probe, answer, np.ones(count, dtype=bool), np.ones(count, dtype=bool))
    shift = settings.seq_len + 1 - length  # to the right end
    places = (np.arange(settings.seq_len + 1) - shift[:, None]) % tokens.shape[
        1
    ]  # what comes from behind the end is padding
    tokens, answers = np.take_along_axis(tokens, places, 1), np.take_along_axis(answers, places, 1)
    return Example(tokens[:, :-1], (answers if test else tokens)[:, 1:])


def _motifs(tokens: Tokens, longest: int, size: Tokens, rng: np.random.Generator) -> Tokens:
    """``[N, longest]``: different tokens in each row, the first ``size`` of them, then -1."""
    drawn = np.empty((len(size), longest), dtype=np.int64)
    for column in range(longest):
        index = rng.integers(0, len(tokens) - column, len(size))
        for earlier in np.sort(drawn[:, :column], axis=1).T:  # skip those that are taken
            index += index >= earlier
        drawn[:, column] = index
    return np.where(np.arange(longest) < size[:, None], tokens[drawn], -1)


def memorization(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    keys, value_of = _memorized_map(settings.vocab_size)
    chosen = rng.integers(0, len(keys), (count, settings.seq_len // 2))
    inputs = np.full((count, settings.seq_len), settings.vocab_size - 1)
    targets = np.full_like(inputs, IGNORED)
    inputs[:, ::2], targets[:, 1::2] = chosen, value_of[chosen]
    return Example(inputs, targets)


def compression(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    tokens = rng.choice(settings.content, (count, settings.seq_len))
    tokens[:, -1] = settings.vocab_size - 1
    return Example(tokens, tokens.copy())


def selective_copying(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    copied, rows = settings.copied, np.arange(count)[:, None]
    content = rng.choice(settings.content, (count, copied))
    blanks = rng.integers(0, copied, (count, settings.seq_len - 2 * copied - 1))
    before = (blanks[:, :, None] == np.arange(copied)).sum(1)  # blanks just before each token
    inputs = np.full((count, settings.seq_len), settings.blank)
    inputs[rows, np.arange(copied) + before.cumsum(1)] = content
    inputs[:, -copied - 1] = settings.vocab_size - 1
    targets = np.full_like(inputs, IGNORED)
    targets[:, -copied:] = content
    return Example(inputs, targets)
