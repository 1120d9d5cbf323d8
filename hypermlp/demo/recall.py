"""Three mixers learn in-context recall side by side: how many steps does each need?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hypermlp import mad
from hypermlp.mad.backbones import LanguageBackbone
from hypermlp.mad.protocol import Training
from hypermlp.mad.training import evaluate, train_step

BATCH, SOLVED, MOST_STEPS, EVALUATE_EVERY = 32, 0.99, 500, 10
TRAINING = Training(batch_size=BATCH, learning_rate=1e-3, precision="float32")
MIXERS = {"HyperGLU": "G-cg-q-12o", "softmax with RoPE": "S-p", "softmax": "S"}


class Racer:
    """A model in training, with its number of steps and its accuracy on the test sequences."""

    def __init__(self, name: str, seed: int):
        torch.manual_seed(seed)
        self.name, self.label, self.step, self.accuracy = name, MIXERS[name], 0, 0.0
        self.model = LanguageBackbone(self.label, vocab_size=16, max_length=128)
        # PyTorch's own initialisation: with the benchmark's smaller one, softmax attention takes much longer.
        self.model.embedding.reset_parameters()
        self.curve: list[tuple[int, float]] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), TRAINING.learning_rate, weight_decay=0.0)

    @property
    def solved(self) -> bool:
        return self.accuracy >= SOLVED

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        """Make one optimizer step."""
        train_step(self.model, self.optimizer, inputs, targets, TRAINING.learning_rate, TRAINING)
        self.step += 1

    def evaluate(self, inputs: Tensor, targets: Tensor) -> None:
        """Measure the accuracy over the positions that have a target."""
        self.accuracy = evaluate(self.model, inputs, targets, self.step, TRAINING).micro
        self.curve.append((self.step, self.accuracy))


def racers(seed: int) -> list[Racer]:
    """Return one racer per mixer; all begin with the same seed."""
    return [Racer(name, seed) for name in MIXERS]


def race(field: list[Racer], seed: int, most_steps: int = MOST_STEPS) -> Iterator[None]:
    """Train all racers in turn on the same batches, and yield after every step.

    The race ends when all but the last racer have solved the task, or after ``most_steps`` steps.
    """
    settings: dict[str, Any] = {"num_train": BATCH * most_steps, "num_test": 2 * BATCH, "sampler": "fast"}
    (inputs, targets), test = (
        [torch.from_numpy(x) for x in mad.generate("in-context-recall", split=split, seed=seed, **settings)]
        for split in ("train", "test")
    )
    for batch in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        for racer in field:
            if not racer.solved:
                racer.train(*batch)
                if racer.step % EVALUATE_EVERY == 0:
                    racer.evaluate(*test)
        yield
        if all(racer.solved for racer in field[:-1]):
            return
