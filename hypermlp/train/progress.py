"""What a run says while it goes on: a line for people, metrics.jsonl for programs. And stopping when asked to."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hypermlp.train.recipe import Recipe


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress(TrainerCallback):
    """Loss, tokens per second and time left; every log also goes to metrics.jsonl."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.path = recipe, folder / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began, self.first_step = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        kept = []
        if self.path.exists():  # what was logged after the checkpoint that the run goes on from will be logged again
            kept = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] <= state.global_step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        seconds, done = time.monotonic() - self.began, state.global_step - self.first_step
        speed = done * self.recipe.training.batch_tokens / seconds if done else 0.0
        record = {"step": state.global_step, "tokens": state.global_step * self.recipe.training.batch_tokens, **logs}
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
        left = (state.max_steps - state.global_step) * seconds / done if done else 0.0
        shown = [f"{name} {logs[name]:.4f}" for name in ("loss", "eval_loss", "eval_train_loss", "eval_validation_loss") if name in logs]
        if shown:
            head = f"step {state.global_step}/{state.max_steps}"
            print(f"{head}  {'  '.join(shown)}  {speed:,.0f} tokens/s  {duration(left)} left", flush=True)


class StopOnSignal(TrainerCallback):
    """SIGTERM: finish the step, save, stop."""

    def __init__(self) -> None:
        self.asked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = signal.signal(signal.SIGTERM, self._ask)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _ask(self, *_args: Any) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asked:
            print(f"stopping at step {state.global_step}, as asked by SIGTERM", file=sys.stderr, flush=True)
            control.should_save = control.should_training_stop = True
