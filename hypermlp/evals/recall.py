"""Recall by length: small models, trained at one length, are tested at 1, 2, 4 and 8 times that length.

Two tasks, each a pure function of (settings, generator): MAD's in-context recall, and a needle in source
code. Shapes: N examples, T positions.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hypermlp import mad
from hypermlp.evals.variants import Variant
from hypermlp.layers.registry import mixer_name
from hypermlp.mad.protocol import Training
from hypermlp.mad.training import evaluate, train_step
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.reporting.table import Table
from hypermlp.train.corpus import documents
from hypermlp.train.data import held_out
from hypermlp.train.recipe import DataSettings

SUITE = "recall-length"
SEED = 1
TIMES = (1, 2, 4, 8)
MIXERS = (
    *("HyperGLU@zero", "HyperGLU@mean", "HyperGLU@repeat", "HyperGLU@log-lag", "HyperGLU@window"),
    *("S-pc", "S-pc@ntk", "S-pc@yarn", "S-pc@window", "S-p", "S-p@ntk", "S-p@yarn", "S", "gated-deltanet"),
)
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 160,
    "block": "llama",
}
RATE = 2e-3  # constant after a warm-up of EVERY steps
HOW: dict[str, Any] = {"epochs": 1, "precision": "float32"}
QUESTIONS, EVERY, SOLVED = 256, 50, 0.995
Row = dict[str, Any]


class RecallTask(NamedTuple):
    """A task of the suite."""

    title: str
    vocab_size: int
    length: int
    """Positions in training."""
    steps: int
    """Most optimizer steps; training ends earlier once the task is solved."""
    draw: Callable[[int, int, np.random.Generator, bool], tuple[Tensor, Tensor]]
    """Return inputs and targets ``[N, T]``, given N, T, a generator, and whether they are test examples."""


def mad_recall(count: int, length: int, rng: np.random.Generator, test: bool) -> tuple[Tensor, Tensor]:
    """Return MAD's in-context recall, as ``hypermlp.mad`` generates it; only repeated keys are scored."""
    split = "test" if test else "train"
    inputs, targets = mad.generate(
        "in-context-recall",
        split=split,
        seed=int(rng.integers(2**31)),
        sampler="fast",
        seq_len=length,
        **{f"num_{split}": count},
    )
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def needle(count: int, length: int, rng: np.random.Generator, test: bool) -> tuple[Tensor, Tensor]:
    """Return source code with a needle in it: the byte "§" and a letter.

    At the end stands "§" again, and the letter is the target. Training examples have "§" and the same letter
    at three more places, which are targets too, except for the first; test examples have held-out code::

        input    def f(x):\\n §q    return x + 1\\n§
        target   - - ...                         q
    """
    code, marks = _code(test), 2 if test else 5
    room = length + 1 - 2 * marks  # bytes of code
    first, letter = rng.integers(len(code) - room, size=(count, 1)), rng.integers(26, size=(count, 1))
    places = np.sort(rng.integers(room + 1, size=(count, marks - 1)), axis=1)
    places = np.concatenate([places + 2 * np.arange(marks - 1), np.full((count, 1), length - 1)], axis=1)
    is_code, rows = np.ones((count, length + 1), dtype=bool), np.arange(count)[:, None]
    is_code[rows, places] = is_code[rows, places + 1] = False
    tokens = np.empty((count, length + 1), dtype=np.int64)
    tokens[is_code] = code[first + np.arange(room)].flatten()
    tokens[rows, places], tokens[rows, places + 1] = ord("§"), ord("a") + letter
    targets = np.full((count, length), mad.IGNORED)
    targets[rows, places[:, 1:]] = tokens[rows, places[:, 1:] + 1]
    return torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets)


@cache
def _code(test: bool) -> NDArray[np.uint8]:
    """Return the source of Python's standard library: the held-out documents, or 4 MB of the others."""
    data, size, parts = DataSettings(source="stdlib"), 0, []
    for document in documents(data):
        if held_out(document, data.validation) == test and size < 4 << 20:
            parts.append(document.encode("ascii", "ignore"))
            size += len(parts[-1])
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


TASKS = {
    "recall": RecallTask("MAD's in-context recall", 16, 128, 1000, mad_recall),
    "needle": RecallTask("needle in source code", 256, 64, 1000, needle),
}


class Logits(nn.Module):
    """A language model that returns its logits alone."""

    def __init__(self, model: HyperMLPForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def train(task: RecallTask, mixer: str, *, steps: int, report: Callable[[str], None]) -> tuple[Logits, Row]:
    """Train a model on a task until it is solved, or for ``steps`` steps; return it and how that went."""
    torch.manual_seed(SEED)
    sizes = MODEL | {"vocab_size": task.vocab_size, "max_position_embeddings": task.length}
    model = Logits(HyperMLPForCausalLM(HyperMLPConfig(mixer=mixer, **sizes)))
    training = Training(batch_size=64, learning_rate=RATE, weight_decay=0.1, **HOW)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=training.weight_decay)
    test = task.draw(QUESTIONS, task.length, np.random.default_rng([SEED, 1]), True)
    stream, began, accuracy, done = np.random.default_rng([SEED, 0]), time.monotonic(), 0.0, 0
    for done in range(1, steps + 1):
        x, y = task.draw(training.batch_size, task.length, stream, False)
        train_step(model, optimizer, x, y, RATE * min(1.0, done / EVERY), training)
        if done % EVERY == 0 or done == steps:
            accuracy = evaluate(model, *test, done, training).micro
            report(f"{mixer}: {task.title}, step {done}/{steps}, {accuracy:.1%}")
            if accuracy > SOLVED:
                break
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return model.eval(), {"steps": done, "parameters": parameters, "seconds": time.monotonic() - began}


def accuracies(task: RecallTask, model: HyperMLPForCausalLM, variant: Variant) -> dict[str, float]:
    """Return the share of correct answers at every length."""
    shares = {}
    training = Training(batch_size=32, **HOW)
    for times in TIMES:
        length = times * task.length
        inputs, targets = task.draw(QUESTIONS, length, np.random.default_rng([SEED, 2, times]), True)
        if variant.kind == "recomputed":
            window = variant.window(task.length)
            inputs, targets = inputs[:, -window:], targets[:, -window:]
        changed = Logits(variant.applied(model, task.length, length)).eval()
        shares[str(times)] = evaluate(changed, inputs, targets, 0, training).micro
    return shares


def evaluate_recall(names: list[str], *, limit: int | None, report: Callable[[str], None]) -> Iterator[Row]:
    """Yield a row for each task and each of ``names`` (MIXER or MIXER@VARIANT; none: MIXERS).

    ``limit`` is the most steps of a training, None for the task's own. The variants of a mixer share one
    training.
    """
    variants = [Variant.parse(name) for name in names or MIXERS]
    sources = dict.fromkeys(variant.source for variant in variants)
    mixers = {source: mixer_name(source) for source in sources}  # raises for an unknown name
    for task in TASKS.values():
        for source, mixer in mixers.items():
            model, outcome = train(task, mixer, steps=limit or task.steps, report=report)
            for variant in (variant for variant in variants if variant.source == source):
                accuracy = accuracies(task, model.model, variant)
                row = {"task": task.title, "length": task.length, "name": f"{source}{variant.name}"}
                yield {**row, "mixer": mixer, **outcome, "accuracy": accuracy}


def recall_table(rows: list[Row]) -> Table:
    """Return a table of the accuracies in percent, by task, mixer and length."""
    lines = [
        [
            row["task"],
            row["name"],
            f"{row['steps']:,}",
            *(f"{100 * accuracy:.1f}" for accuracy in row["accuracy"].values()),
        ]
        for row in rows
    ]
    titles = [f"{times}x" for times in TIMES]
    return Table(["task", "model", "steps", *titles], lines, frozenset({"model"}))
