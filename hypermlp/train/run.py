"""A training run: a recipe from its beginning to its end, or from the newest complete checkpoint."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import transformers

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.models.loading import model_folder, our_config
from hypermlp.models.parameters import require_memory
from hypermlp.sealed import newest_complete, problem, step_of
from hypermlp.train.data import SPLITS, PreparedData, Sequences, prepare
from hypermlp.train.folder import RunFolder
from hypermlp.train.progress import StopOnSignal, StoppedEarly, TrainingLog
from hypermlp.train.recipe import Recipe
from hypermlp.train.trainer import LMTrainer, training_arguments

Callbacks = Sequence[transformers.TrainerCallback]


def build_model(recipe: Recipe, prepared: PreparedData, init_from: str | None) -> HyperMLPForCausalLM:
    """Return the recipe's model, with new weights from its seed or with those of ``init_from``.

    ``init_from`` is as for ``model_folder``.
    """
    transformers.set_seed(recipe.training.seed)
    tokenizer = prepared.tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = recipe.model_config(len(tokenizer), **special)
    require_memory(config, f"recipe {recipe.name}")
    if init_from is None:
        return HyperMLPForCausalLM(config)
    try:
        init_from = str(model_folder(init_from))
    except UserError as error:
        raise UserError(f"--init-from: {error}") from error
    saved, context = our_config(init_from), config.max_position_embeddings
    stored = config.max_position_embeddings = saved.max_position_embeddings
    _check_initial(config, saved, recipe, init_from)
    try:
        model = HyperMLPForCausalLM.from_pretrained(init_from, config=config)
    except RuntimeError as error:
        raise UserError(
            f"the weights in {init_from} do not fit the recipe's model; the report above names them. Set the "
            f"keys of the section model as in {init_from}/config.json"
        ) from error
    if context != stored:
        model.extend_context(context)
        if is_main_process():
            print(f"{init_from} has a context of {stored}; it now has one of {context}", flush=True)
    return model


def _check_initial(config: HyperMLPConfig, saved: HyperMLPConfig, recipe: Recipe, init_from: str) -> None:
    """Refuse other sizes of the model, and say which settings without weights the recipe changes."""
    widths = config.intermediate_size, saved.intermediate_size
    if recipe.model.get("match_parameters") and widths[0] != widths[1]:
        raise UserError(
            f"model.match_parameters gives an MLP of width {widths[0]} at this context; {init_from} has "
            f"{widths[1]}: pass --set model.match_parameters=null --set model.intermediate_size={widths[1]}"
        )
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    different = [name for name in sizes if getattr(config, name) != getattr(saved, name)]
    if different:
        each = ", ".join(f"{name} {getattr(config, name)}, not {getattr(saved, name)}" for name in different)
        raise UserError(
            f"the weights in {init_from} do not fit the recipe's model, which has {each}; "
            "change the section model (for another vocabulary, data.tokenizer)"
        )
    for name in ("sliding_window", "rope_type", "rope_factor"):
        ours, theirs = getattr(config, name), getattr(saved, name)
        if ours != theirs and is_main_process():
            print(f"{init_from} has {name} {theirs}; the recipe sets {ours} (model.{name})", flush=True)


def build_trainer(
    recipe: Recipe,
    folder: Path,
    prepared: PreparedData,
    model: HyperMLPForCausalLM,
    callbacks: Callbacks = (),
) -> LMTrainer:
    """Return the trainer of a run, which writes to ``folder``."""
    training, data = recipe.training, recipe.data
    prepared.tokenizer.model_max_length = model.config.max_position_embeddings
    sequences = Sequences(
        prepared, "train", data, count=training.steps * recipe.sequences_per_step, seed=training.seed
    )
    trainer = LMTrainer(
        recipe,
        folder,
        model=model,
        args=training_arguments(recipe, folder, process_count()),
        train_dataset=sequences,
        eval_dataset={
            split: Sequences(prepared, split, data, count=training.eval_sequences, seed=training.seed + 1)
            for split in SPLITS
        },
        processing_class=prepared.tokenizer,
        callbacks=[TrainingLog(recipe, folder, sequences.per_epoch), *callbacks],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # TrainingLog prints instead
    return trainer


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    init_from: str | None = None,
    callbacks: Callbacks = (),
) -> Path:
    """Train and save a model; return the final model's folder, or ``folder`` if a signal stopped the run.

    Args:
        recipe: what to train.
        folder: the folder of the run, for checkpoints, logs and the final model.
        resume: continue from the newest complete checkpoint in ``folder``, if there is one.
        init_from: saved model, as for ``model_folder``, whose weights a new run begins with.
        callbacks: further callbacks for Trainer.
    """
    recipe.accumulation(process_count())  # raises before any work if the batch cannot be divided
    try:
        with StopOnSignal() as stop:
            return _train(recipe, RunFolder(folder), resume, init_from, [stop, *callbacks])
    except StoppedEarly:
        print("stopping on a signal before the first step", file=sys.stderr, flush=True)
        return folder


def _train(recipe: Recipe, run: RunFolder, resume: bool, init_from: str | None, callbacks: Callbacks) -> Path:
    folder = run.path
    with run.lock() if is_main_process() else contextlib.nullcontext():
        checkpoint = _checkpoint_to_resume(run, recipe, resume)
        done = 0 if checkpoint is None else step_of(checkpoint)
        if done >= recipe.training.steps and problem(folder / "final") is None:
            print(
                f"{folder} has {done} steps, training.steps is {recipe.training.steps}: nothing to do",
                flush=True,
            )
            return folder / "final"
        transformers.logging.disable_progress_bar()  # it would show a bar for every checkpoint
        prepared = prepare(recipe.data)
        if checkpoint is not None:
            run.check_data(prepared.digest)
        elif resume:  # the run may have been stopped before its first checkpoint
            init_from = init_from or run.beginning().get("init_from")
        model = build_model(recipe, prepared, init_from if checkpoint is None else None)
        trainer = build_trainer(recipe, folder, prepared, model, callbacks)  # raises for too little data
        if is_main_process():
            run.begin(recipe, prepared.digest, init_from)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return trainer.save_final() if trainer.state.global_step >= recipe.training.steps else folder


def _checkpoint_to_resume(run: RunFolder, recipe: Recipe, resume: bool) -> Path | None:
    """Return the newest complete checkpoint; raise if it must not be continued, or not with this recipe."""
    found = newest_complete(run.path, put_away=resume and is_main_process())
    if found is not None:
        if not resume:
            raise UserError(
                f"{run.path} has checkpoints already; "
                f"pass --resume to continue from {found.name}, or another --out"
            )
        run.check_recipe(recipe)
    return found


def process_count() -> int:
    """Return the number of processes that train together: torchrun sets WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process writes the run's files: torchrun sets RANK."""
    return os.environ.get("RANK", "0") == "0"
