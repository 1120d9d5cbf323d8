"""What a run says while it goes on: a line for people, metrics.jsonl for programs. And stopping when asked to."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hypermlp.train import sharding
from hypermlp.train.recipe import Recipe


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress(TrainerCallback):
    """Loss, tokens per second and time left; every log also goes to metrics.jsonl."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.path = recipe, folder / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.began, self.first_step = time.monotonic(), state.global_step
        held = _of_all_processes(sharding.local_size(model), args)
        if not state.is_world_process_zero:
            return
        aside = self.path.with_suffix(".part")
        aside.write_text("".join(json.dumps(record) + "\n" for record in self._until(state.global_step)))
        aside.replace(self.path)
        self._write(
            {
                "step": state.global_step,
                "parameters": sum(p.numel() for p in model.parameters()),
                "held_by_process": held,
            }
        )
        shares = " and ".join(f"{count:,}" for count in held)
        print(
            f"{self.recipe.name}: {len(held)} process{'es' * (len(held) > 1)}, holding {shares} parameters",
            flush=True,
        )

    def _write(self, record: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _until(self, step: int) -> list[dict[str, Any]]:
        """What was logged up to a step; what came after the checkpoint that a run goes on from will be logged again."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.exists() and step else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # half a line of a process that was killed
                continue
            if isinstance(record, dict) and record.get("step", step + 1) <= step:
                records.append(record)
        return records

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if (
            not state.is_world_process_zero or not logs or "train_runtime" in logs
        ):  # Trainer's summary, of this process's part only
            return
        seconds, done = time.monotonic() - self.began, state.global_step - self.first_step
        speed = done * self.recipe.training.batch_tokens / seconds if done else 0.0
        self._write(
            {
                "step": state.global_step,
                "tokens": state.global_step * self.recipe.training.batch_tokens,
                **logs,
            }
        )
        left = (state.max_steps - state.global_step) * seconds / done if done else 0.0
        shown = [
            f"{name} {logs[name]:.4f}"
            for name in ("loss", "eval_loss", "eval_train_loss", "eval_validation_loss")
            if name in logs
        ]
        if shown:
            head = f"step {state.global_step}/{state.max_steps}"
            print(f"{head}  {'  '.join(shown)}  {speed:,.0f} tokens/s  {duration(left)} left", flush=True)


class StopOnSignal(TrainerCallback):
    """SIGTERM or Ctrl-C: finish the step, save, stop; a second Ctrl-C stops at once. If one process gets it, all stop at one step."""

    def __init__(self) -> None:
        self.asked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._anyone_asked(args):
            if state.is_world_process_zero:
                print(
                    f"asked to stop: saving step {state.global_step} of {state.max_steps}; --resume goes on",
                    file=sys.stderr,
                    flush=True,
                )
            control.should_save = control.should_training_stop = True

    def _anyone_asked(self, args: Any) -> bool:
        return any(_of_all_processes(int(self.asked), args))


def _of_all_processes(value: int, args: Any) -> list[int]:
    if args.world_size == 1:
        return [value]
    mine = torch.tensor([value], device=args.device)
    gathered = [torch.zeros_like(mine) for _ in range(args.world_size)]
    torch.distributed.all_gather(gathered, mine)
    return [int(each) for each in gathered]
