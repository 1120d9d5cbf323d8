"""``hypermlp train``: a recipe from beginning to end, or on from its newest checkpoint."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import transformers

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train import checkpoints
from hypermlp.train.data import PreparedData, Sequences, prepare
from hypermlp.train.folder import RunFolder
from hypermlp.train.progress import Progress, StopOnSignal
from hypermlp.train.recipe import Recipe, load_recipe
from hypermlp.train.trainer import BadLossError, LMTrainer, training_arguments

FINAL = "final"
Callbacks = Sequence[transformers.TrainerCallback]


def build_model(recipe: Recipe, prepared: PreparedData, init_from: str | None) -> HyperMLPForCausalLM:
    """With new weights from the recipe's seed, or with those of a saved folder."""
    transformers.set_seed(recipe.training.seed)
    tokenizer = prepared.tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = recipe.model_config(len(tokenizer), **special)
    if init_from is None:
        return HyperMLPForCausalLM(config)
    if not (Path(init_from) / "config.json").is_file():
        raise UserError(
            f"--init-from is {init_from}, which has no model; allowed: a folder of save_pretrained, such as runs/NAME/final"
        )
    try:
        return HyperMLPForCausalLM.from_pretrained(init_from, config=config)
    except RuntimeError as error:
        raise UserError(f"the weights in {init_from} do not fit the recipe's model: {error}") from error


def build_trainer(
    recipe: Recipe,
    folder: Path,
    prepared: PreparedData,
    model: HyperMLPForCausalLM,
    callbacks: Callbacks = (),
) -> LMTrainer:
    training, data = recipe.training, recipe.data
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    train = Sequences(
        prepared, "train", data, count=training.steps * recipe.sequences_per_step, seed=training.seed
    )
    return LMTrainer(
        recipe,
        folder,
        model=model,
        args=training_arguments(recipe, folder, processes),
        train_dataset=train,
        eval_dataset={
            split: Sequences(prepared, split, data, count=training.eval_sequences, seed=training.seed + 1)
            for split in ("train", "validation")
        },
        processing_class=prepared.tokenizer,
        callbacks=[Progress(recipe, folder), StopOnSignal(), *callbacks],
    )


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    init_from: str | None = None,
    callbacks: Callbacks = (),
) -> Path:
    """Train and save; returns the folder of the final model, or the run's where a signal stopped it. ``callbacks`` are for Trainer."""
    recipe.accumulation(int(os.environ.get("WORLD_SIZE", "1")))  # says what is wrong before anything is done
    run = RunFolder(folder)
    if _is_main():
        run.lock()
    try:
        return _train(recipe, run, resume=resume, init_from=init_from, callbacks=callbacks)
    finally:
        run.unlock()


def _train(
    recipe: Recipe, run: RunFolder, *, resume: bool, init_from: str | None, callbacks: Callbacks
) -> Path:
    found = checkpoints.newest_complete(run.path, put_away=resume and _is_main())
    if found is not None and not resume:
        raise UserError(
            f"{run.path} has checkpoints already; pass --resume to go on from {found.name}, or another --out"
        )
    if found is not None:
        run.check_recipe(recipe)
    final, done = run.path / FINAL, 0 if found is None else checkpoints.step_of(found)
    if done >= recipe.training.steps and checkpoints.problem(final) is None:
        print(
            f"{run.path} has {done} steps already, training.steps is {recipe.training.steps}: nothing to do",
            flush=True,
        )
        return final
    transformers.logging.disable_progress_bar()  # a bar for every checkpoint otherwise
    prepared = prepare(recipe.data)
    if found is not None:
        run.check_data(prepared.digest)
    elif resume:
        init_from = init_from or run.begun().get(
            "init_from"
        )  # a run that was stopped before its first checkpoint
    if _is_main():
        run.keep(recipe, prepared.digest, init_from)
    model = build_model(recipe, prepared, init_from if found is None else None)
    trainer = build_trainer(recipe, run.path, prepared, model, callbacks)
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(found) if found is not None else None)
    if trainer.state.global_step < recipe.training.steps:
        return run.path  # stopped by a signal: the checkpoint is there
    return _save_final(trainer, run.path)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _save_final(trainer: LMTrainer, folder: Path) -> Path:
    aside, final = folder / checkpoints.ASIDE / FINAL, folder / FINAL
    trainer.save_model(str(aside))
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        checkpoints.put_in_place(aside, final)
        checkpoints.remove_unfinished(folder)
    return final


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of one in recipes/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key, such as training.steps=100",
    )
    parser.add_argument("--out", metavar="FOLDER", help="where the run lives (default: runs/NAME)")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest complete checkpoint, if there is one"
    )
    parser.add_argument(
        "--init-from",
        metavar="FOLDER",
        help="begin with the weights of a saved model, where --resume has no checkpoint",
    )


def main(args: argparse.Namespace) -> None:
    recipe = load_recipe(args.recipe, args.set)
    folder = Path(args.out) if args.out else Path("runs") / recipe.name
    try:
        final = train(recipe, folder, resume=args.resume, init_from=args.init_from)
    except (BadLossError, OSError) as error:
        raise UserError(error) from error
    if _is_main():
        print(f"saved in {final}", flush=True)
