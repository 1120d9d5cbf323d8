"""Train the language models of a study with the project's trainer.

A training that was stopped resumes from its checkpoint.
"""

import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hypermlp.costs.model import forward_flops_per_token
from hypermlp.jobs.cells import Outcome, print_status, record_path, run_with_progress
from hypermlp.jobs.workers import Progress, Workers
from hypermlp.models import HyperMLPConfig
from hypermlp.reporting.sources import METRICS, read_metrics
from hypermlp.study.protocol import LmCell, Size, lm_cells
from hypermlp.study.tuning import tuned_rates
from hypermlp.train.data import prepare
from hypermlp.train.folder import BusyError
from hypermlp.train.recipe import Recipe, build
from hypermlp.train.run import train
from hypermlp.train.trainer import BadLossError

RUNNING = "running"  # folder of the checkpoints of unfinished cells
BUSY_SECONDS = 30.0  # how long to wait for another process to release the run folder
LAST = 5  # the paper's loss is the mean of so many last evaluations


class ReportProgress(TrainerCallback):
    """Call a progress callback at every log of the trainer."""

    def __init__(self, on_progress: Callable[[Progress], None]):
        self.on_progress, self.began = on_progress, time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs and "loss" in logs:
            seconds, metric = time.monotonic() - self.began, f"loss {logs['loss']:.3f}"
            self.on_progress(Progress(state.global_step, state.max_steps, seconds, metric))


def work(
    cell: LmCell,
    device: str,
    on_progress: Callable[[Progress], None],
    *,
    folder: Path,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Train one model and return its results. A training that diverges has the loss None.

    ``folder`` holds the checkpoints during training; on a cluster it must be shared by all machines. With
    ``evaluate``, the finished model is evaluated on the suite ``local`` and kept in ``folder/models``.
    """
    device, began = _show_only(device), time.monotonic()
    recipe: Recipe = build(Recipe, cell.recipe, "")
    run = record_path(folder / RUNNING, cell).with_suffix("")
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        try:
            final = _train_when_free(recipe, run, ReportProgress(on_progress))
        except BadLossError as error:
            shutil.rmtree(run)
            return {"loss": None, "diverged": str(error), "seconds": time.monotonic() - began}
    if final == run:
        raise RuntimeError("the training was asked to stop; its checkpoint is kept")
    result = {**read_run(run, recipe, cell.loss), "seconds": time.monotonic() - began}
    if evaluate:
        kept = record_path(folder / "models", cell).with_suffix("")
        result["local"] = _scores(final, device)
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        final.rename(kept)
    shutil.rmtree(run)
    return result


def _show_only(device: str) -> str:
    """Hide all GPUs but the one of a cell from this process; return the name that it has then.

    Trainer takes every visible GPU: it would spread one model over several of them (DataParallel).
    """
    kind, _, index = device.partition(":")
    if kind in ("cpu", "cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = visible.split(",")[int(index or 0)] if visible else index or "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = "" if kind == "cpu" else chosen
        return kind
    return device


def _scores(model: Path, device: str) -> dict[str, Any]:
    """Return the columns of the suite ``local`` for a saved model."""
    from hypermlp.evals.run import evaluate  # needs lm_eval, which a study without evaluation does not

    row = evaluate(
        str(model),
        "local",
        batch_size=32,
        max_length=None,
        limit=None,
        device=device,
        report=lambda line: None,  # the study prints its own status lines
    )
    return row["scores"]


def _train_when_free(recipe: Recipe, run: Path, callback: TrainerCallback) -> Path:
    """Train as soon as the run folder is free: a worker of a study that was just killed may still hold it."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return train(recipe, run, resume=True, callbacks=[callback])
        except BusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def read_run(run: Path, recipe: Recipe, loss: str) -> dict[str, Any]:
    """Return the results of a finished run; ``loss`` ("validation" or "train") chooses the reported one."""
    records = read_metrics(run / METRICS)
    curves = {
        split: [[record["step"], record[key]] for record in records if key in record]
        for split, key in (("train", "eval_train_loss"), ("validation", "eval_validation_loss"))
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


def run_lm(wanted: list[LmCell], folder: Path, workers: Workers, *, evaluate: bool = False) -> Outcome:
    """Train the cells that have no record in ``folder``; ``evaluate`` is passed to ``work``."""
    recipe: Recipe = build(Recipe, wanted[0].recipe, "")
    prepare(recipe.data)  # once, before several workers need it
    train_cell = partial(work, folder=folder.absolute(), evaluate=evaluate)
    outcome = run_with_progress(train_cell, wanted, folder, workers)
    with contextlib.suppress(OSError):  # not empty if a training was stopped: its checkpoint is kept
        (folder / RUNNING / "lm").rmdir()
        (folder / RUNNING).rmdir()
    return outcome


def tune_and_run(size: Size, rows: list[str], folder: Path, workers: Workers) -> Outcome:
    """Choose every row's learning rate, then train the reported models."""

    def train_cells(wanted: list[LmCell]) -> list[tuple[LmCell, dict[str, Any]]]:
        outcome = run_lm(wanted, folder, workers)
        outcome.raise_if_failed()
        return outcome.results

    rates = tuned_rates(size, rows, train_cells)
    if rates:
        print_status("learning rates: " + ", ".join(f"{row} {rate:g}" for row, rate in rates.items()))
    return run_lm(list(lm_cells(size, rows, rates)), folder, workers, evaluate=size.evaluate)
