"""One language model of the study: trained by the project's own trainer, and on from its checkpoint where it was stopped."""

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

from hypermlp.costs.model import forward_flops_per_token
from hypermlp.jobs.cells import record_path
from hypermlp.jobs.workers import Progress
from hypermlp.models import HyperMLPConfig
from hypermlp.study.protocol import LmCell
from hypermlp.train.folder import BusyError
from hypermlp.train.recipe import Recipe, build
from hypermlp.train.run import train
from hypermlp.train.trainer import BadLossError

RUNNING = "running"
PATIENCE = 30.0  # seconds
LAST = 5  # evaluations that the paper takes the mean of


class Telling(TrainerCallback):
    """Passes on how far a training is."""

    def __init__(self, tell: Callable[[Progress], None]):
        self.tell, self.began = tell, time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs and "loss" in logs:
            self.tell(
                Progress(
                    state.global_step,
                    state.max_steps,
                    time.monotonic() - self.began,
                    f"loss {logs['loss']:.3f}",
                )
            )


def work(
    cell: LmCell, device: str, tell: Callable[[Progress], None], *, folder: Path, evaluate: bool = False
) -> dict[str, Any]:
    """Train one model and return its results. A training that diverges has the loss None.

    ``folder`` holds the checkpoints while it runs: on a cluster, a shared one. With ``evaluate``, the finished model goes through
    the suite ``local`` and is kept in ``folder/models``.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    recipe: Recipe = build(Recipe, cell.recipe, "")
    run = record_path(folder / RUNNING, cell).with_suffix("")
    run.mkdir(parents=True, exist_ok=True)
    with open(run / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        try:
            final = _train_when_free(recipe, run, Telling(tell))
        except BadLossError as error:
            shutil.rmtree(run)
            return {"loss": None, "diverged": str(error), "seconds": time.monotonic() - began}
    if final == run:
        raise RuntimeError("it was asked to stop; its checkpoint is kept")
    result = {**read_run(run, recipe, cell.loss), "seconds": time.monotonic() - began}
    if evaluate:
        kept = record_path(folder / "models", cell).with_suffix("")
        result["local"] = _scores(final, device)
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        final.rename(kept)
    shutil.rmtree(run)
    return result


def _scores(model: Path, device: str) -> dict[str, Any]:
    """Return the columns of the suite ``local`` for a saved model."""
    from hypermlp.evals.run import evaluate  # needs lm_eval, which a study without evaluation does not

    def silent(_: str) -> None:
        """Drop the progress lines: the study prints its own."""

    row = evaluate(
        str(model), "local", batch_size=32, max_length=None, limit=None, device=device, tell=silent
    )
    scores: dict[str, Any] = row["scores"]
    return scores


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
        split: [
            [record["step"], record[f"eval_{split}_loss"]]
            for record in records
            if f"eval_{split}_loss" in record
        ]
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
