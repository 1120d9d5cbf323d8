"""The tasks are the benchmark's, bit for bit: published hashes of what others' code makes."""

import hashlib

import numpy as np
import pytest

from hypermlp import mad

# First 16 hex digits of SHA-256 over little-endian int64: inputs[0], targets[0], inputs[:256], targets[:256]
HASHES = {
    "in-context-recall": ("1b5596189a277ffe", "a2ddc1e2d6b844ea", "4e844206ea53c267", "6e1f253545eebaca"),
    "noisy-in-context-recall": (
        "97dd5d89f9b3077a",
        "bdb446e54a21d114",
        "2894eaec34349ca0",
        "12db06ab9bd921b5",
    ),
    "fuzzy-in-context-recall": (
        "4bd1347f2ce28597",
        "cfaf2b4db4a257f1",
        "fbc421e19ed529a2",
        "146efb4f8f748a8d",
    ),
    "memorization": ("7beb8680a5e256d9", "56cf04203f7bf248", "3732a8933ac51323", "6aa6df0033e44eed"),
    "compression": ("d8947e7c0168b353", "d8947e7c0168b353", "8683f823c95c5ece", "8683f823c95c5ece"),
    "selective-copying": ("702fffb940966d48", "0c06a11c530bdaee", "6f35926d8e95e775", "afc9a8727b03b737"),
}
SCORED = {  # positions of the whole baseline test set, which is drawn after 12,800 training examples
    "in-context-recall": 71_680,
    "noisy-in-context-recall": 55_841,
    "fuzzy-in-context-recall": 5_783,
    "memorization": 20_480,
    "compression": 40_960,
    "selective-copying": 20_480,
}
QUICK = {"memorization", "compression", "selective-copying"}


def digest(tokens):
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("task", HASHES)
def test_training_sets_have_the_published_hashes(task):
    inputs, targets = mad.generate(task, num_train=256)
    assert inputs.dtype == targets.dtype == np.int64
    assert (digest(inputs[0]), digest(targets[0]), digest(inputs), digest(targets)) == HASHES[task]


@pytest.mark.parametrize(
    "task", [task if task in QUICK else pytest.param(task, marks=pytest.mark.slow) for task in SCORED]
)
def test_test_sets_have_as_many_scored_positions(task):
    inputs, targets = mad.generate(task, split="test")
    assert len(inputs) == len(targets) == 1280
    assert int((targets != mad.IGNORED).sum()) == SCORED[task]


@pytest.mark.parametrize("sampler", ["published", "fast"])
@pytest.mark.parametrize("task", ["in-context-recall", "noisy-in-context-recall"])
def test_what_is_scored_can_be_known(task, sampler):
    size = {"vocab_size": 48} if "noisy" in task else {"vocab_size": 32}
    inputs, targets = mad.generate(
        task, split="test", num_train=10, num_test=50, seq_len=64, sampler=sampler, **size
    )
    for row, answers in zip(inputs, targets, strict=True):
        for place in range(0, 63, 2):  # keys stand at even places
            before = np.flatnonzero(row[:place:2] == row[place]) * 2
            is_key = row[place] < 16
            assert (answers[place] != mad.IGNORED) == (is_key and len(before) > 0)
            if answers[place] != mad.IGNORED:
                assert {int(row[p + 1]) for p in before} == {int(answers[place])}


@pytest.mark.parametrize("sampler", ["published", "fast"])
def test_fuzzy_answers_follow_their_motif(sampler):
    inputs, targets = mad.generate(
        "fuzzy-in-context-recall", split="test", num_train=5, num_test=200, sampler=sampler
    )
    answerable = 0
    for row, answers in zip(inputs, targets, strict=True):
        full = np.append(row, answers[-1])  # the last value is not in the input
        places = np.flatnonzero(answers != mad.IGNORED) + 1  # of the values in the full sequence
        assert (full[places] == answers[places - 1]).all()
        starts = [p for p in places if p - 1 not in places]
        for start in starts:
            key = full[start - 3 : start]
            assert (key < 7).all()
            assert len(set(key.tolist())) == 3
        key = full[starts[-1] - 3 : starts[-1]]
        answerable += any((full[i : i + 3] == key).all() for i in range(starts[-1] - 5))
    assert answerable >= 0.9 * len(inputs)  # 2 % have a probe that was nowhere before


def test_copying_repeats_what_is_not_blank():
    for sampler in ("published", "fast"):
        inputs, targets = mad.generate(
            "selective-copying", num_train=20, seq_len=64, copied=8, sampler=sampler
        )
        for row, answers in zip(inputs, targets, strict=True):
            assert row[-9] == 15
            assert row[-10] < 14  # the last one stands just before the sign
            assert (row[:-9][row[:-9] < 14] == answers[-8:]).all()
            assert (answers[:-8] == mad.IGNORED).all()


def summary(task, sampler, split):
    """Return statistics of the distribution: token counts by place, scored targets, repetitions."""
    settings = {"num_train": 300, "num_test": 1500} if split == "test" else {"num_train": 1500}
    inputs, targets = mad.generate(task, split=split, sampler=sampler, seed=3, **settings)
    half = inputs.shape[1] // 2
    return {
        "tokens": np.bincount(inputs.ravel(), minlength=256)[:256] / inputs.size,
        "early": np.bincount(inputs[:, :half].ravel(), minlength=256)[:256] / inputs.size,
        "scored": [(targets != mad.IGNORED).mean(), (targets[:, half:] != mad.IGNORED).mean()],
        "answers": np.bincount(targets[targets >= 0], minlength=256)[:256] / targets.size,
        "repeats": [(inputs[:, lag:] == inputs[:, :-lag]).mean() for lag in (1, 2, 3, 4, 6)],
        "distinct": [len(np.unique(row)) for row in inputs[:1500]],
    }


@pytest.mark.thorough
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", HASHES)
def test_the_fast_sampler_has_the_same_distribution(task, split):
    published, fast = summary(task, "published", split), summary(task, "fast", split)
    for name in ("tokens", "early", "answers", "repeats"):
        assert np.abs(np.subtract(published[name], fast[name])).max() < 0.006, name
    assert published["scored"] == pytest.approx(fast["scored"], rel=0.06, abs=1e-3)
    assert np.mean(published["distinct"]) == pytest.approx(np.mean(fast["distinct"]), rel=0.02)


def test_the_fast_sampler_is_a_function_of_its_seed():
    first, again, other = (
        mad.generate("compression", sampler="fast", num_train=5, seed=seed).inputs for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "recall"}, "unknown task 'recall'; allowed: in-context-recall"),
        ({"split": "dev"}, "split is 'dev'; it must be 'train' or 'test'"),
        ({"sampler": "slow"}, "sampler is 'slow'; it must be 'published' or 'fast'"),
        ({"vocabulary": 3}, "unknown settings vocabulary; allowed: vocab_size"),
        ({"frac_noise": 0.5}, "unknown settings frac_noise; allowed: vocab_size"),
        ({"seq_len": 7}, "seq_len is 7; it must be even"),
        ({"seq_len": 2}, "seq_len is 2; it must be an integer, 4 or more"),
        ({"vocab_size": 1}, "vocab_size is 1; it must be an integer, 2 or more"),
        ({"num_train": -1}, "num_train is -1"),
        ({"num_train": 0}, "num_train is 0; it must be positive to generate the train split"),
        ({"task": "noisy-in-context-recall", "frac_noise": 1.0}, "frac_noise is 1.0"),
        (
            {"task": "noisy-in-context-recall", "vocab_size": 16},
            "vocab_size is 16; it must be an integer, 18 or more: 0 special, 16 for noise",
        ),
        (
            {"task": "fuzzy-in-context-recall", "vocab_size": 6},
            "vocab_size is 6; it must be an integer, 7 or more: 1 special",
        ),
        ({"task": "fuzzy-in-context-recall", "seq_len": 18}, "seq_len is 18; it must be above 18"),
        ({"task": "selective-copying", "seq_len": 32}, "copied is 16; it must be 1 to 15"),
        ({"task": "memorization", "seq_len": 9}, "seq_len is 9; it must be even"),
    ],
)
def test_errors_before_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        mad.generate(**({"task": "in-context-recall"} | arguments))
