"""One cell: train a backbone on a task, evaluate it, say how well it did.

Shapes: B batch, T positions, V vocabulary.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.jobs.workers import Progress
from hypermlp.mad.backbones import build_backbone
from hypermlp.mad.mixers import MakeMixer, resolve
from hypermlp.mad.protocol import Cell, Training
from hypermlp.mad.published import Example
from hypermlp.mad.settings import IGNORED
from hypermlp.mad.tasks import both_splits, find_task

FLOOR = 1e-6  # of the cosine


class Evaluation(NamedTuple):
    step: int
    perplexity: float
    macro: float
    micro: float


def macro_accuracy(predicted: Tensor, targets: Tensor) -> float:
    """The mean over classes of how many of a class were found; a class that was only predicted counts 0.

    Targets 8 8 9 9, predictions 8 9 9 3: a half of 8, a half of 9, nothing of 3, so a third.
    """
    classes = torch.cat([predicted, targets]).unique()
    found = [((predicted == c) & (targets == c)).sum() / max(1, int((targets == c).sum())) for c in classes]
    return float(torch.stack(found).mean())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, step: int, training: Training) -> Evaluation:
    """Over a data set: perplexity and accuracy over positions, and the mean over batches of the accuracy over classes."""
    model.eval()
    loss, correct, count, macro = 0.0, 0, 0, 0.0
    for x, y in zip(inputs.split(training.batch_size), targets.split(training.batch_size), strict=True):
        with autocast(training, x):
            logits = model(x)
        scored = y != IGNORED
        loss += float(nn.functional.cross_entropy(logits.float()[scored], y[scored], reduction="sum"))
        predicted = logits.argmax(-1)[scored]
        correct += int((predicted == y[scored]).sum())
        count += int(scored.sum())
        macro += len(x) * macro_accuracy(predicted, y[scored])
    perplexity = math.exp(min(loss / count, 700.0)) if math.isfinite(loss) else math.inf
    return Evaluation(step, perplexity, macro / len(inputs), correct / count)


def autocast(training: Training, x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=training.precision == "bfloat16")


def rate_at(passed: float, training: Training) -> float:
    """``passed`` is the share of the training that is over."""
    if training.schedule == "constant":
        return training.learning_rate
    return FLOOR + (training.learning_rate - FLOOR) * (1 + math.cos(math.pi * passed)) / 2


def work(cell: Cell, device: str, tell: Callable[[Progress], None]) -> dict[str, Any]:
    """For a worker: a mixer of the user's is imported there."""
    return run_cell(cell, mixer=resolve(cell.mixer), device=device, tell=tell)


def run_cell(
    cell: Cell,
    *,
    mixer: str | MakeMixer | None = None,
    device: str = "cpu",
    tell: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Train and score; the result is a dictionary for a record. ``mixer`` stands in for the cell's where a user brings a module."""
    began, training = time.perf_counter(), cell.training
    task = find_task(cell.task)
    settings = task.settings(**cell.settings)
    (inputs, targets), test = (
        _tensors(drawn, device) for drawn in both_splits(task, settings, cell.seed, cell.sampler)
    )
    torch.manual_seed(cell.seed)
    chosen = mixer if mixer is not None else cell.mixer
    model = build_backbone(
        cell.task, chosen, vocab_size=settings.vocab_size, max_length=settings.seq_len, width=cell.width
    ).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, weight_decay=training.weight_decay
    )
    order = torch.Generator().manual_seed(cell.seed)
    per_epoch = -(-len(inputs) // training.batch_size)
    every, steps = training.evaluate_every or per_epoch, per_epoch * training.epochs
    curve: list[Evaluation] = []
    for step in range(steps):
        epoch, batch = divmod(step, per_epoch)
        if batch == 0:
            shuffled = torch.randperm(len(inputs), generator=order).to(device)
        passed = (
            step / steps if training.epochs == 1 else epoch / training.epochs
        )  # as published, an epoch has one rate
        for group in optimizer.param_groups:
            group["lr"] = rate_at(passed, training)
        chosen_rows = shuffled[batch * training.batch_size : (batch + 1) * training.batch_size]
        _step(model, optimizer, inputs[chosen_rows], targets[chosen_rows], training)
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append(evaluate(model, *test, step + 1, training))
            accuracy = getattr(curve[-1], training.accuracy)
            if tell is not None:
                tell(Progress(step + 1, steps, time.perf_counter() - began, f"{accuracy:.1%}"))
            if accuracy > training.solved or not math.isfinite(curve[-1].perplexity):
                break
    taken = min(curve, key=lambda e: e.perplexity) if training.score == "best" else curve[-1]
    return {
        "score": getattr(taken, training.accuracy),
        **_plain(taken),
        "steps": curve[-1].step,
        "diverged": not math.isfinite(curve[-1].perplexity),
        "curve": [list(_plain(evaluation).values()) for evaluation in curve],
        "curve_columns": list(Evaluation._fields),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "device": device,
        "seconds": time.perf_counter() - began,
    }


def _plain(evaluation: Evaluation) -> dict[str, float | None]:
    """JSON has no word for infinity."""
    return evaluation._asdict() | {
        "perplexity": evaluation.perplexity if math.isfinite(evaluation.perplexity) else None
    }


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, training: Training
) -> None:
    model.train()
    with autocast(training, x):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _tensors(drawn: Example, device: str) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(drawn.inputs).to(device), torch.from_numpy(drawn.targets).to(device)
