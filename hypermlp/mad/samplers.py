"""Fast samplers of the six tasks: many examples at once, with the distribution of the published examples.

Every function takes (settings, generator, number of examples, whether they are test examples);
hypermlp/mad/published.py explains the tasks. Shapes: N examples.
"""

import numpy as np

from hypermlp.mad.published import Example, Tokens, ask, memorized_map
from hypermlp.mad.settings import IGNORED, Settings


def recall(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    slots, keys = settings.seq_len // 2 - 1, len(settings.keys)  # without the last slot
    rows = np.arange(count)[:, None]
    noisy = rng.random((count, slots)) < settings.frac_noise
    protected = rng.integers(0, slots + 1, count)
    noisy[protected < slots, protected[protected < slots]] = False
    noisy[noisy.all(1), 0] = False  # very rare; at least one slot must hold a key
    key = rng.integers(0, keys, (count, slots))
    value_of = settings.values[rng.integers(0, len(settings.values), (count, keys))]
    first = np.full((count, keys), slots)  # first slot of each key; ``slots`` if it does not occur
    for slot in reversed(range(slots)):
        shown = ~noisy[:, slot]
        first[shown, key[shown, slot]] = slot
    last = np.where(first < slots, rng.random((count, keys)), -1.0).argmax(1)  # one of the keys that occurred
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
    """Append a pair to every example in each turn; a key is known if it equals the key of an earlier turn."""
    longest_key, longest_value = settings.key_motif, settings.value_motif
    width = longest_key + longest_value

    def draw() -> tuple[Tokens, Tokens]:
        """Draw a key and a value for each example, padded with -1."""
        key_size = np.full(count, longest_key) if test else rng.integers(1, longest_key + 1, count)
        key = _motifs(settings.keys, longest_key, key_size, rng)
        return key, _motifs(settings.values, longest_value, rng.integers(1, longest_value + 1, count), rng)

    probe, answer = draw()
    pair = (probe >= 0).sum(1) + (answer >= 0).sum(1)
    insertion = rng.integers(0, settings.seq_len - 2 * pair)
    length, placed = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    # Each turn adds a block of tokens ``[N, width]`` and one of test targets, with -1 for no token.
    tokens = [np.full((count, settings.seq_len + 1), -1)]
    answers = [np.full((count, settings.seq_len + 1), IGNORED)]
    no_key = np.full_like(probe, IGNORED)
    while (active := length < settings.seq_len - pair - width).any():
        key, value = draw()
        due = (length >= insertion) & ~placed
        key = np.where(due[:, None], probe, key)
        is_probe = (key == probe).all(1)
        value = np.where(is_probe[:, None], answer, value)
        known = np.zeros(count, dtype=bool)
        for turn in tokens[1:]:
            same = (turn[:, :longest_key] == key).all(1)
            known |= same
            value = np.where(same[:, None], turn[:, longest_key:], value)
        tokens.append(np.where(active[:, None], np.hstack([key, value]), -1))
        answers.append(np.hstack([no_key, np.where(known[:, None], value, IGNORED)]))
        length += (tokens[-1] >= 0).sum(1)
        placed |= is_probe & active
    sequence, scored = np.hstack([*tokens, probe, answer]), np.hstack([*answers, no_key, answer])
    # A stable sort moves the tokens to the right end, in order; what remains on the left is padding.
    order = np.argsort(sequence >= 0, axis=1, kind="stable")[:, -settings.seq_len - 1 :]
    sequence, scored = np.take_along_axis(sequence, order, 1), np.take_along_axis(scored, order, 1)
    scored[sequence < 0] = IGNORED
    sequence[sequence < 0] = settings.pad
    return Example(sequence[:, :-1], (scored if test else sequence)[:, 1:])


def _motifs(tokens: Tokens, longest: int, size: Tokens, rng: np.random.Generator) -> Tokens:
    """Return ``[N, longest]``: in each row ``size`` different tokens, then -1."""
    drawn = np.empty((len(size), longest), dtype=np.int64)
    for column in range(longest):
        index = rng.integers(0, len(tokens) - column, len(size))
        for earlier in np.sort(drawn[:, :column], axis=1).T:  # skip tokens that are taken
            index += index >= earlier
        drawn[:, column] = index
    return np.where(np.arange(longest) < size[:, None], tokens[drawn], -1)


def memorization(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    keys, _ = memorized_map(settings.vocab_size)
    return ask(settings, rng.integers(0, len(keys), (count, settings.seq_len // 2)))


def compression(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    tokens = rng.choice(settings.content, (count, settings.seq_len))
    tokens[:, -1] = settings.vocab_size - 1
    return Example(tokens, tokens.copy())


def selective_copying(settings: Settings, rng: np.random.Generator, count: int, test: bool) -> Example:
    copied, rows = settings.copied, np.arange(count)[:, None]
    content = rng.choice(settings.content, (count, copied))
    blanks = rng.integers(0, copied, (count, settings.seq_len - 2 * copied - 1))
    before = (blanks[:, :, None] == np.arange(copied)).sum(1)  # number of blanks directly before each token
    inputs = np.full((count, settings.seq_len), settings.blank)
    inputs[rows, np.arange(copied) + before.cumsum(1)] = content
    inputs[:, -copied - 1] = settings.vocab_size - 1
    targets = np.full_like(inputs, IGNORED)
    targets[:, -copied:] = content
    return Example(inputs, targets)
