"""The tasks are the benchmark's, bit for bit: published hashes of what others' code makes."""

import hashlib

import numpy as np
import pytest

from hypermlp import mad

# first 16 hex digits of SHA-256 over little-endian int64: inputs[0], targets[0], inputs[0:256], targets[0:256]
HASHES = {
    "in-context-recall": ("1b5596189a277ffe", "a2ddc1e2d6b844ea", "4e844206ea53c267", "6e1f253545eebaca"),
}
SCORED = {"in-context-recall": 71_680}  # positions of the whole baseline test set


def digest(tokens):
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("task", HASHES)
def test_training_sets_have_the_published_hashes(task):
    inputs, targets = mad.generate(task, num_train=256)
    assert (digest(inputs[0]), digest(targets[0]), digest(inputs), digest(targets)) == HASHES[task]


@pytest.mark.parametrize("task", SCORED)
def test_test_sets_have_as_many_scored_positions(task):
    inputs, targets = mad.generate(task, split="test")
    assert inputs.shape == targets.shape == (1280, 127)
    assert int((targets != mad.IGNORED).sum()) == SCORED[task]


def test_what_is_scored_can_be_known():
    inputs, targets = mad.generate("in-context-recall", split="test", num_train=10, num_test=50, vocab_size=32, seq_len=64)
    for row, answers in zip(inputs, targets, strict=True):
        for place in np.flatnonzero(answers != mad.IGNORED):
            before = np.flatnonzero(row[:place:2] == row[place]) * 2  # keys stand at even places
            assert len(before) > 0
            assert {int(row[p + 1]) for p in before} == {int(answers[place])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "recall"}, "unknown task 'recall'; allowed: in-context-recall"),
        ({"split": "dev"}, "unknown split 'dev'; allowed: 'train', 'test'"),
        ({"vocabulary": 3}, "unknown settings vocabulary; allowed: vocab_size"),
        ({"seq_len": 7}, "seq_len is 7; it must be even"),
        ({"frac_noise": 0.5}, "frac_noise is 0.5"),
    ],
)
def test_errors_before_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        mad.generate(**({"task": "in-context-recall"} | arguments))
