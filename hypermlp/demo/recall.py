"""Three mixers learn in-context recall side by side: how many steps until they can?"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hypermlp import mad
from hypermlp.mad.backbones import LanguageBackbone

BATCH, LEARNING_RATE, SOLVED, MOST_STEPS, EVALUATE_EVERY = 32, 1e-3, 0.99, 500, 10


@dataclass
class Racer:
    """A model, and how far it is."""

    name: str
    label: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    accuracy: float = 0.0
    curve: list[float] = field(default_factory=list)

    @property
    def solved(self) -> bool:
        return self.accuracy >= SOLVED

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> None:
        scored = targets != mad.IGNORED
        self.accuracy = float((self.model(inputs).argmax(-1) == targets)[scored].float().mean())
        self.curve.append(self.accuracy)


def racers(seed: int) -> list[Racer]:
    result = []
    for name, label in (("HyperGLU", "G-cg-q-12o"), ("softmax with RoPE", "S-p"), ("softmax", "S")):
        torch.manual_seed(seed)
        model = LanguageBackbone(label, vocab_size=16, max_length=128)
        model.embedding.reset_parameters()  # PyTorch's own: with the benchmark's small ones softmax attention takes much longer
        result.append(
            Racer(name, label, model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0))
        )
    return result


def race(field: list[Racer], seed: int, most_steps: int = MOST_STEPS) -> Iterator[None]:
    """Train in turns, the same batches for all, until each but the last can do it, or ``most_steps``; yields after every step."""
    settings: dict[str, Any] = {
        "num_train": BATCH * most_steps,
        "num_test": 2 * BATCH,
        "seed": seed,
        "sampler": "fast",
    }
    inputs, targets = (torch.from_numpy(x) for x in mad.generate("in-context-recall", **settings))
    test = [torch.from_numpy(x) for x in mad.generate("in-context-recall", split="test", **settings)]
    for step in range(most_steps):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        for racer in field:
            if racer.solved:
                continue
            racer.train(inputs[batch], targets[batch])
            if racer.step % EVALUATE_EVERY == 0:
                racer.evaluate(*test)
        yield
        if all(racer.solved for racer in field[:-1]):
            return
