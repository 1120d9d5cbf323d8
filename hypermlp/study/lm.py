"""One language model of the study: trained by the project's own trainer, and on from its checkpoint where it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hypermlp.cells import record_path
from hypermlp.models import HyperMLPConfig
from hypermlp.study.protocol import LmCell
from hypermlp.train.costs import forward_flops_per_token
from hypermlp.train.folder import BusyError
from hypermlp.train.recipe import Recipe, build
from hypermlp.train.run import train
from hypermlp.workers import Progress

RUNNING = "running"
PATIENCE = 30.0  # seconds
LAST = 5  # evaluations that the paper takes the mean of


class Telling(TrainerCallback):
    """Passes on how far a training is."""

    def __init__(self, tell: Callable[[Progress], None]):
        self.tell, self.began = tell, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.tell(Progress(state.global_step, state.max_steps, time.monotonic() - self.began, f"loss {logs['loss']:.3f}"))


def work(cell: LmCell, device: str, tell: Callable[[Progress], None], *, folder: Path) -> dict[str, Any]:
    """``folder`` holds the checkpoints while it runs: on a cluster, a shared one."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    recipe: Recipe = build(Recipe, cell.recipe, "")
    run = record_path(folder / RUNNING, cell).with_suffix("")
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        final = _train_when_free(recipe, run, Telling(tell))
    if final == run:
        raise RuntimeError("it was asked to stop; its checkpoint is kept")
    result = {**read_run(run, recipe, cell.loss), "seconds": time.monotonic() - began}
    shutil.rmtree(run)
    return result


def _train_when_free(recipe: Recipe, run: Path, telling: Telling) -> Path:
    """A worker of a study that was killed a moment ago may still be there."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return train(recipe, run, resume=True, callbacks=[telling])
        except BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def read_run(run: Path, recipe: Recipe, loss: str) -> dict[str, Any]:
    """What a finished run says of itself."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The two splits are logged one after the other, each with its own line or both in one.
    curves = {
        split: [[record["step"], record[f"eval_{split}_loss"]] for record in records if f"eval_{split}_loss" in record]
        for split in ("train", "validation")
    }
    ends = {
        "train": statistics.fmean(value for _, value in curves["train"][-LAST:]),
        "validation": curves["validation"][-1][1],
    }
    config = HyperMLPConfig.from_pretrained(run / "final")
    return {
        "loss": ends[loss],
        "train_loss": ends["train"],
        "validation_loss": ends["validation"],
        "curves": curves,
        "parameters": next(record["parameters"] for record in records if "parameters" in record),
        "forward_flops_per_token": forward_flops_per_token(config, recipe.data.context),
        "tokens": recipe.training.steps * recipe.training.batch_tokens,
        "data_digest": json.loads((run / "recipe.json").read_text())["data_digest"],
    }
