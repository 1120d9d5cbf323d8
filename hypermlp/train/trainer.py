"""transformers' Trainer with our data order, optimizer, schedule and checkpoints; it stops at a bad loss."""

import json
import math
import shutil
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, default_collate
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hypermlp import sealed
from hypermlp.errors import UserError, first_line
from hypermlp.files import write_text
from hypermlp.train import sharding
from hypermlp.train.data import IGNORED, Sequences
from hypermlp.train.recipe import Recipe
from hypermlp.train.schedule import learning_rate_factor, optimizer_groups
from hypermlp.validation import require

RECENT = 50  # micro-batches whose mean loss the next loss is compared with
OPTIMIZER, SCHEDULER, RECENT_LOSSES = "optimizer", "scheduler.pt", "recent-losses.json"
WITHOUT_OUTPUTS: dict[str, Any] = {"skip_logits": True, "use_cache": False}  # training needs the loss alone
ADVICE = "begin again with --init-from CHECKPOINT and a lower training.learning_rate"


class BadLossError(UserError):
    """The loss or gradient is non-finite, or the loss exceeds ``explosion`` times its recent mean."""


def training_arguments(recipe: Recipe, folder: Path, processes: int) -> TrainingArguments:
    """Return Trainer's arguments for a recipe that ``processes`` processes train."""
    training = recipe.training
    require(
        "training.report_to",
        training.report_to,
        set(training.report_to) <= {*INTEGRATION_TO_CALLBACK, "all", "none"},
        f"a list with some of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}",
    )
    cpu = not torch.cuda.is_available()
    # Later versions of transformers warn about this argument even if it is False.
    asked = training.gradient_checkpointing
    checkpointing: dict[str, Any] = {"gradient_checkpointing": True} if asked else {}
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
        **checkpointing,
        use_cache=recipe.model.get("use_cache", True),  # goes into config.json; training itself uses none
        torch_compile=training.compile,
        use_cpu=cpu,
        disable_tqdm=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        dataloader_pin_memory=not cpu,
        ddp_find_unused_parameters=False,
    )


class LMTrainer(Trainer):
    """Trainer for a recipe: deterministic data order, complete checkpoints, and an error at a bad loss."""

    model: Any  # Trainer declares these as optional
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    eval_dataset: dict[str, Sequences]

    def __init__(self, recipe: Recipe, folder: Path, **kwargs: Any):
        self.recipe, self.folder = recipe, folder
        self.recent: deque[float] = deque(maxlen=RECENT)
        super().__init__(**kwargs)
        self.sharded = recipe.training.sharding and self.args.world_size > 1
        if self.sharded:  # keeps Trainer from wrapping the model, which places and reduces gradients itself
            self.is_distributed_loading_by_transformers = True

    def _get_train_sampler(self, *_args: Any) -> SequentialSampler:
        """Take sequences in the order of ``Sequences``, which shuffles by index."""
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Take the steps between logs, evaluations and checkpoints from the recipe, not from a checkpoint."""
        position = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return position

    def create_optimizer(self, *_args: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            training = self.recipe.training
            # Shard after a checkpoint's weights are loaded and before the optimizer sees the parameters.
            if self.sharded:
                sharding.shard(self.model)
            self.optimizer = torch.optim.AdamW(
                optimizer_groups(self.model, training),
                training.learning_rate,
                (float(training.betas[0]), float(training.betas[1])),
                training.eps,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: learning_rate_factor(step, self.recipe.training)
            )
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs | WITHOUT_OUTPUTS, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        value, step = float(loss) * self.args.gradient_accumulation_steps, self.state.global_step
        usual = statistics.fmean(self.recent) if len(self.recent) == RECENT else None
        limit = math.inf if usual is None else self.recipe.training.explosion * usual
        if not math.isfinite(value) or value > limit:
            path = self.folder / f"bad-batch-step-{step}.json"
            batch = {name: x.tolist() for name, x in inputs.items()}
            write_text(path, json.dumps({"step": step, "loss": value, "usual": usual, "batch": batch}))
            raise BadLossError(
                f"the loss is {value} at step {step} (recent mean: {usual}); "
                f"the batch is in {path}. Look at that batch, or {ADVICE}."
            )
        self.recent.append(value)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(float(norm)):
            raise BadLossError(
                f"the gradient is {float(norm)} at step {self.state.global_step}, though the loss is finite; "
                f"the weights were not updated. To go on, {ADVICE}."
            )
        return norm

    @torch.no_grad()
    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """Log and return each split's mean loss over all targets, however they are divided into batches."""
        model = self.model_wrapped.eval()
        metrics = {}
        for split, sequences in self.eval_dataset.items():
            total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
            for batch in self._evaluation_batches(sequences):
                inputs = self._prepare_inputs(batch)
                one = torch.ones((), device=self.args.device)  # the sum instead of the mean
                summed = model(**inputs, num_items_in_batch=one, **WITHOUT_OUTPUTS).loss
                total += torch.stack([summed.double(), (inputs["shift_labels"] != IGNORED).sum().double()])
            loss, count = self.accelerator.reduce(total).tolist()
            metrics[f"eval_{split}_loss"] = loss / max(1.0, count)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluation_batches(self, sequences: Sequences) -> Iterator[dict[str, Tensor]]:
        """Yield this process's batches. Every process has the same number; the last may have no targets."""
        micro, rank = self.args.per_device_eval_batch_size, self.args.process_index
        for first in range(rank * micro, len(sequences) + rank * micro, micro * self.args.world_size):
            items = [sequences[min(i, len(sequences) - 1)] for i in range(first, first + micro)]
            for beyond in items[max(0, len(sequences) - first) :]:
                beyond["labels"] = beyond["shift_labels"] = torch.full_like(beyond["labels"], IGNORED)
            yield default_collate(items)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        assert output_dir is not None
        weights = sharding.whole_weights(self.model) if self.sharded else None
        if self.args.should_save:
            self.model.save_pretrained(output_dir, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def save_final(self) -> Path:
        """Save the model as ``final`` in the run's folder; return its path. All processes must call this."""
        aside, final = self.folder / sealed.ASIDE / "final", self.folder / "final"
        self.save_model(str(aside))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            sealed.put_in_place(aside, final)
            sealed.remove_unfinished(self.folder)
        return final

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Do not warn about tied weights, which are saved once."""
        tied = set(self.model.all_tied_weights_keys)
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharding.save_optimizer(self._adamw(), self.model, Path(output_dir, OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))
            Path(output_dir, RECENT_LOSSES).write_text(json.dumps(list(self.recent)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            sharding.load_optimizer(self._adamw(), self.model, Path(checkpoint, OPTIMIZER))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
            for group, rate in zip(self._adamw().param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate  # the scheduler would only set it at its next step
            self.recent.extend(json.loads(Path(checkpoint, RECENT_LOSSES).read_text()))

    def _adamw(self) -> torch.optim.AdamW:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return where Trainer writes checkpoints; ``_save_checkpoint`` then puts them in place."""
        return str(self.folder / sealed.ASIDE)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        aside = self.folder / sealed.ASIDE / name
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                sealed.put_in_place(aside, self.folder / name)
                sealed.remove_old(self.folder, self.recipe.training.keep)
        except Exception as error:  # each file format raises its own error when the disk is full
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(
                f"checkpoint {self.folder / name} could not be written ({first_line(error)}); "
                "the checkpoint before it is intact"
            ) from error
