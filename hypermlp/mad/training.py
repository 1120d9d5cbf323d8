"""Train and score cells: one in a worker, or the whole benchmark in this process.

Shapes: B batch, T positions, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypermlp.jobs.cells import ProgressPrinter, finite_fields
from hypermlp.jobs.workers import OnProgress, Progress
from hypermlp.mad.backbones import build_backbone
from hypermlp.mad.mixers import MakeMixer, check_mixers, resolve
from hypermlp.mad.protocol import MadCell, Training, cells, find_grid
from hypermlp.mad.report import Scores, summarize
from hypermlp.mad.settings import IGNORED
from hypermlp.mad.tasks import TASKS, find_task

FLOOR = 1e-6  # learning rate at the end of the cosine schedule


class Evaluation(NamedTuple):
    """Perplexity and accuracies on the test set after a step."""

    step: int
    perplexity: float
    macro: float
    micro: float


def macro_accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Return the mean over classes of the share of each class that is predicted correctly.

    A class that occurs only among the predictions counts as 0. Example: for targets 8 8 9 9 and predictions
    8 9 9 3, half of class 8, half of class 9 and nothing of class 3 is correct, so the result is a third.
    """
    classes = torch.cat([predicted, targets]).unique()
    shares = [((predicted == c) & (targets == c)).sum() / max(1, int((targets == c).sum())) for c in classes]
    return float(torch.stack(shares).mean())


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, step: int, training: Training) -> Evaluation:
    """Evaluate a data set. The macro accuracy is a mean over batches, the other metrics over positions."""
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
    """Return the learning rate after the share ``passed`` (0 to 1) of the training."""
    if training.schedule == "constant":
        return training.learning_rate
    return FLOOR + (training.learning_rate - FLOOR) * (1 + math.cos(math.pi * passed)) / 2


def plan_steps(examples: int, training: Training, seed: int) -> Iterator[tuple[float, Tensor]]:
    """Yield the learning rate of each step and the indices of the examples in its batch."""
    order = torch.Generator().manual_seed(seed)
    for epoch in range(training.epochs):
        batches = torch.randperm(examples, generator=order).split(training.batch_size)
        for number, batch in enumerate(batches):
            # As published, the rate changes between epochs only; with a single epoch it changes at each step.
            passed = number / len(batches) if training.epochs == 1 else epoch / training.epochs
            yield rate_at(passed, training), batch


def run_cell(
    cell: MadCell,
    device: str = "cpu",
    on_progress: Callable[[Progress], None] | None = None,
    *,
    mixer: str | MakeMixer | None = None,
) -> dict[str, Any]:
    """Train and score a cell; return the results for its record.

    ``mixer`` replaces the cell's own, which is otherwise built, or imported, by its name.
    """
    began, training = time.perf_counter(), cell.training
    made = mixer or resolve(cell.mixer)  # before the seed is set: a user's module may draw random numbers
    task = find_task(cell.task)
    settings = task.settings(**cell.settings)
    splits = task.draw(settings, cell.seed, cell.sampler, "train", "test")
    inputs, targets, *test = (torch.from_numpy(part).to(device) for split in splits for part in split)
    torch.manual_seed(cell.seed)
    sizes = {"vocab_size": settings.vocab_size, "max_length": settings.seq_len, "width": cell.width}
    model = build_backbone(cell.task, made, **sizes).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, weight_decay=training.weight_decay
    )
    per_epoch = -(-len(inputs) // training.batch_size)
    every, steps = training.evaluate_every or per_epoch, per_epoch * training.epochs
    curve: list[Evaluation] = []
    for step, (rate, batch) in enumerate(plan_steps(len(inputs), training, cell.seed), 1):
        rows = batch.to(device)
        train_step(model, optimizer, inputs[rows], targets[rows], rate, training)
        if step % every and step != steps:
            continue
        curve.append(evaluate(model, test[0], test[1], step, training))
        accuracy = getattr(curve[-1], training.accuracy)
        if on_progress is not None:
            on_progress(Progress(step, steps, time.perf_counter() - began, f"{accuracy:.1%}"))
        if accuracy > training.solved or not math.isfinite(curve[-1].perplexity):
            break
    scored = min(curve, key=lambda each: each.perplexity) if training.score == "best" else curve[-1]
    return {
        "score": getattr(scored, training.accuracy),
        **finite_fields(scored),
        "steps": curve[-1].step,
        "diverged": not math.isfinite(curve[-1].perplexity),
        "curve": [list(finite_fields(evaluation).values()) for evaluation in curve],
        "curve_columns": list(Evaluation._fields),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "device": device,
        "seconds": time.perf_counter() - began,
    }


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    rate: float,
    training: Training,
) -> None:
    """Take one optimizer step on a batch, with the learning rate ``rate``."""
    model.train()
    with autocast(training, x):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def benchmark(
    mixer: str | MakeMixer,
    *,
    grid: str = "mini",
    tasks: str | list[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Scores:
    """Train and score one mixer on the benchmark, in this process on the CPU. Nothing is written to disk.

    Every training uses a model of two blocks, each the mixer and a SwiGLU MLP, with the seed 12345.

    Args:
        mixer: "HyperGLU", "HyperMLP"; a label such as "G-cg-q-12o"; the name of a baseline such as "gla"
            (``hypermlp.layers.BASELINES`` has all); "package.module:function"; or a function
            ``make(hidden_size=..., max_length=...)`` that returns a causal module ``[B, T, D] -> [B, T, D]``.
            It is called with the grid's width (128; 32 for "smoke") and the length of the task's sequences.
        grid: "smoke": two steps of each task, in seconds; "mini" (the default): each task once, minutes on
            two cores; "full": as published, 66 settings and 396 trainings of up to 200 epochs, for GPUs (run
            those with the command ``hypermlp mad run``).
        tasks: a task or a list of tasks (``mad.TASKS``); None, the default, for all six.
        on_progress: called as ``on_progress(cell, progress)`` after each evaluation of a training; ``cell``
            is the training (it has ``mixer``, ``task`` and ``settings``), ``progress`` has ``step``,
            ``steps``, ``seconds`` and ``metric`` (the accuracy as text, such as "6.5%"). None: progress is
            printed to stderr.

    Returns:
        ``Scores``. ``result.scores[mixer][task]`` is an accuracy between 0 and 1; ``print(result)`` shows a
        table in percent, with the published values of the full grid in brackets. The key of a mixer is the
        text that was given; that of a function is its ``__name__``.

    Raises:
        UserError: for an unknown name, or a mixer that fails, is not causal or changes the shape; before any
            training.

    Example::

        from hypermlp import mad

        result = mad.benchmark("G-cg-q-12o", grid="smoke", tasks="compression")
        print(result)
        accuracy = result.scores["G-cg-q-12o"]["compression"]
    """
    name = mixer if isinstance(mixer, str) else getattr(mixer, "__name__", type(mixer).__name__)
    chosen = list(TASKS) if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    wanted = list(cells(name, find_grid(grid), chosen))
    made = resolve(mixer) if isinstance(mixer, str) else mixer
    check_mixers(wanted, made)
    on_progress = on_progress or ProgressPrinter(len(wanted)).update
    return summarize(
        (cell, run_cell(cell, mixer=made, on_progress=partial(on_progress, cell))) for cell in wanted
    )
