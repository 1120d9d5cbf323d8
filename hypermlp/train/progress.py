"""Trainer callbacks: the log of a run, and stopping on a signal."""

import datetime
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.utils import gather  # type: ignore[import-untyped]
from transformers import TrainerCallback

from hypermlp.files import write_text
from hypermlp.train import sharding
from hypermlp.train.recipe import Recipe

LOSSES = ("loss", "eval_train_loss", "eval_validation_loss")


class TrainingLog(TrainerCallback):
    """Print losses, tokens per second and an ETA; append everything that Trainer logs to metrics.jsonl.

    ``per_epoch``: the sequences of one pass over the data.
    """

    def __init__(self, recipe: Recipe, folder: Path, per_epoch: int):
        self.recipe, self.path, self.per_epoch = recipe, folder / "metrics.jsonl", per_epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.began, self.first_step = time.monotonic(), state.global_step
        held = gather_from_processes(sharding.local_size(model), args)
        if not state.is_world_process_zero:
            return
        parameters = sum(p.numel() for p in model.parameters())
        beginning = {"step": state.global_step, "parameters": parameters, "held_by_process": held}
        # A resumed run's history ends with its checkpoint: what was logged later is logged again.
        records = [*(self._record(logs, logs["step"]) for logs in state.log_history), beginning]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
        processes = "1 process" if len(held) == 1 else f"{len(held)} processes"
        shares = " and ".join(f"{count:,}" for count in held)
        print(f"{self.recipe.name}: {processes}, holding {shares} parameters", flush=True)

    def _record(self, logs: dict[str, float], step: int) -> dict[str, float]:
        # Trainer's own "epoch" is the fraction of the run.
        epoch = round(step * self.recipe.sequences_per_step / self.per_epoch, 4)
        return {"step": step, "tokens": step * self.recipe.training.batch_tokens, **logs, "epoch": epoch}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        # Trainer's last log, with train_runtime, ignores what was trained before a resume.
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        step, batch_tokens = state.global_step, self.recipe.training.batch_tokens
        with open(self.path, "a") as file:
            file.write(json.dumps(self._record(logs, step)) + "\n")
        shown = [f"{name} {logs[name]:.4f}" for name in LOSSES if name in logs]
        if shown:
            seconds = (time.monotonic() - self.began) / max(1, step - self.first_step)  # of a step
            left = datetime.timedelta(seconds=round((state.max_steps - step) * seconds))
            speed = f"{batch_tokens / seconds:,.0f} tokens/s  ETA {left}" if step > self.first_step else ""
            print(f"step {step}/{state.max_steps}", *shown, speed, sep="  ", flush=True)


class StoppedEarly(BaseException):
    """SIGTERM arrived before the first step."""


class StopOnSignal(TrainerCallback):
    """On SIGTERM or Ctrl-C, finish the step, save and stop; a second Ctrl-C stops at once.

    A signal to one process stops all processes at the same step. As a context, it also turns a SIGTERM before
    the training begins into ``StoppedEarly``: there is nothing to save yet. The handler raises it wherever
    the program happens to be; if other code replaces it by an error of its own, the context restores it.
    """

    asked = False
    training = False
    early = False

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._handle(signal.SIGTERM)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.early and isinstance(error, Exception):
            raise StoppedEarly from error

    def _handle(self, number: int) -> None:
        handler = signal.signal(number, self._ask)
        self.before.setdefault(number, handler)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.early:  # other code has swallowed the exception
            raise StoppedEarly
        self.training = True
        self._handle(signal.SIGINT)

    def _ask(self, number: int, _frame: Any) -> None:
        if not self.training:
            self.early = True
            raise StoppedEarly
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(gather_from_processes(int(self.asked), args)):
            if state.is_world_process_zero:
                done = f"step {state.global_step} of {state.max_steps}"
                print(f"stopping on a signal: saving {done}", file=sys.stderr, flush=True)
            control.should_save = control.should_training_stop = True


def gather_from_processes(value: int, args: Any) -> list[int]:
    """Return the ``value`` of every process, in the order of their ranks; every process must call this."""
    return list(gather(torch.tensor([value], device=args.device)).tolist())
