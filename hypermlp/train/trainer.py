"""transformers' Trainer with our data order, schedule, checkpoints and safety."""

from __future__ import annotations

import json
import shutil
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from hypermlp.train import checkpoints
from hypermlp.train.recipe import Recipe
from hypermlp.train.schedule import learning_rate_factor, optimizer_groups

RECENT = 50  # micro-batches that a loss is compared with


class BadLossError(RuntimeError):
    """The loss is no number, or far from what it was."""


def training_arguments(recipe: Recipe, folder: Path, processes: int) -> TrainingArguments:
    training = recipe.training
    cpu = not torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        run_name=recipe.name,
        max_steps=training.steps,
        per_device_train_batch_size=training.micro_batch,
        per_device_eval_batch_size=training.micro_batch,
        gradient_accumulation_steps=recipe.accumulation(processes),
        learning_rate=training.learning_rate,
        max_grad_norm=training.clip,
        bf16=training.precision == "bfloat16",
        seed=training.seed,
        eval_strategy="steps",
        eval_steps=training.eval_every,
        save_strategy="steps",
        save_steps=training.save_every,
        logging_steps=training.log_every,
        report_to=training.report_to or "none",
        gradient_checkpointing=training.gradient_checkpointing,
        torch_compile=training.compile,
        use_cpu=cpu,
        disable_tqdm=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        dataloader_pin_memory=not cpu,
        ddp_find_unused_parameters=False,
    )


class LMTrainer(Trainer):
    """Sequences in their own order, our optimizer and schedule, checkpoints that are complete or absent, no bad loss."""

    def __init__(self, recipe: Recipe, folder: Path, **kwargs: Any):
        self.recipe, self.folder = recipe, folder
        self.recent: deque[float] = deque(maxlen=RECENT)
        super().__init__(**kwargs)

    def _get_train_sampler(self, *_args: Any) -> SequentialSampler:
        """The order is the data set's: hypermlp/train/data.py."""
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def create_optimizer(self, *_args: Any) -> Optimizer:
        if self.optimizer is None:
            training = self.recipe.training
            assert self.model is not None
            first, second = training.betas
            self.optimizer = AdamW(optimizer_groups(self.model, training), training.learning_rate, (first, second), training.eps)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            training = self.recipe.training
            chosen = optimizer or self.optimizer
            assert chosen is not None
            self.lr_scheduler = LambdaLR(chosen, lambda step: learning_rate_factor(step, training))
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        value = float(loss) * self.args.gradient_accumulation_steps
        usual = statistics.fmean(self.recent) if len(self.recent) == RECENT else None
        if not value < float("inf") or (usual is not None and value > self.recipe.training.explosion * usual):
            path = self.folder / f"bad-batch-step-{self.state.global_step}.json"
            batch = {name: x.tolist() for name, x in inputs.items()}
            path.write_text(json.dumps({"step": self.state.global_step, "loss": value, "usual": usual, "batch": batch}))
            raise BadLossError(
                f"the loss is {value} at step {self.state.global_step} (before: {usual}); the batch is in {path}. "
                "Resume with a lower training.learning_rate, or look at that batch."
            )
        self.recent.append(value)
        return loss

    def _get_output_dir(self, trial: Any = None) -> str:
        """Where Trainer writes checkpoints: aside. ``_save_checkpoint`` puts them in place."""
        return str(self.folder / checkpoints.ASIDE)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        aside = self.folder / checkpoints.ASIDE / name
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.put_in_place(aside, self.folder / name)
                checkpoints.remove_old(self.folder, self.recipe.training.keep)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(f"checkpoint {name} could not be written, the one before it is intact: {error}") from error
