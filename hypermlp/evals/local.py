"""Data of the tasks that need no network: held-out documents of Python's own source, and recall.

The tasks are YAML files in ``tasks/``, in the harness's format. Loading one imports this module, which
registers the model ``hypermlp`` with the harness.
"""

from functools import cache
from string import ascii_lowercase
from typing import Any

import numpy as np
from datasets import Dataset

from hypermlp import mad
from hypermlp.evals import checkpoint  # noqa: F401  (registers the model)
from hypermlp.train.corpus import documents
from hypermlp.train.data import held_out
from hypermlp.train.recipe import DataSettings

PIECE = 2_000  # characters of a text
CONTEXT, CONTINUATION = 160, 40  # characters
CHOICES = 4
QUESTIONS = 200
PAIRS = 24
SEED = 20261


def text(**_: Any) -> dict[str, Dataset]:
    """Return every held-out document, cut into pieces."""
    pieces = (text[i : i + PIECE] for text in _held_out() for i in range(0, len(text), PIECE))
    return {"test": Dataset.from_list([{"text": piece} for piece in pieces])}


def continuations(**_: Any) -> dict[str, Dataset]:
    """Return questions with four continuations, one true and three from elsewhere.

    ``{"context": "...import os\\nimport sy", "choices": ["s\\n...", ...], "label": 2}``
    """
    generator = np.random.default_rng(SEED)
    whole = [document for document in _held_out() if len(document) > CONTEXT + CONTINUATION]
    lengths = np.array([len(document) for document in whole])
    questions = []
    for _number in range(QUESTIONS):
        drawn = []
        for document in generator.choice(len(whole), CHOICES, p=lengths / lengths.sum()):
            end = int(generator.integers(CONTEXT, lengths[document] - CONTINUATION))
            drawn.append((whole[document][end - CONTEXT : end], whole[document][end : end + CONTINUATION]))
        label = int(generator.integers(CHOICES))
        contexts, choices = zip(*drawn, strict=True)
        questions.append({"context": contexts[label], "choices": choices, "label": label})
    return {"test": Dataset.from_list(questions)}


def recall(**_: Any) -> dict[str, Dataset]:
    """Return MAD's in-context recall as assignments: ``a = 3``, ``d = 0``, ..., last a known key: ``a =``."""
    half = mad.TASKS["in-context-recall"].baseline.vocab_size // 2  # keys, then values
    inputs, targets = mad.generate(
        "in-context-recall", split="test", seq_len=2 * PAIRS, num_train=1, num_test=QUESTIONS
    )
    choices = [f" {value}" for value in range(half)]
    questions = []
    for example, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        last = max(place for place, target in enumerate(answers) if target != mad.IGNORED)
        pairs = zip(example[:last:2], example[1:last:2], strict=True)
        lines = [f"{ascii_lowercase[key]} = {value - half}\n" for key, value in pairs]
        context = f"{''.join(lines)}{ascii_lowercase[example[last]]} ="
        questions.append({"context": context, "choices": choices, "label": answers[last] - half})
    return {"test": Dataset.from_list(questions)}


@cache
def _held_out() -> list[str]:
    data = DataSettings(source="stdlib")
    return [document for document in documents(data) if held_out(document, data.validation)]
