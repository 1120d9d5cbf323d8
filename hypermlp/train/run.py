"""``hypermlp train``: a recipe from beginning to end, or on from its newest checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import transformers

from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train import checkpoints
from hypermlp.train.data import PreparedData, Sequences, prepare
from hypermlp.train.progress import Progress, StopOnSignal
from hypermlp.train.recipe import Recipe, load_recipe
from hypermlp.train.trainer import BadLossError, LMTrainer, training_arguments

FINAL = "final"
FREE_ON_RESUME = {
    "steps", "eval_every", "eval_sequences", "save_every", "keep", "log_every", "report_to", "explosion", "micro_batch", "sharding",
    "cache",
}  # fmt: skip


def build_model(recipe: Recipe, prepared: PreparedData, init_from: str | None) -> HyperMLPForCausalLM:
    """With new weights from the recipe's seed, or with those of a saved folder."""
    transformers.set_seed(recipe.training.seed)
    tokenizer = prepared.tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = recipe.model_config(len(tokenizer), **special)
    if init_from is None:
        return HyperMLPForCausalLM(config)
    return HyperMLPForCausalLM.from_pretrained(init_from, config=config)


def build_trainer(recipe: Recipe, folder: Path, prepared: PreparedData, model: HyperMLPForCausalLM) -> LMTrainer:
    training, data = recipe.training, recipe.data
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    train = Sequences(prepared, "train", data, count=training.steps * recipe.sequences_per_step, seed=training.seed)
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
        callbacks=[Progress(recipe, folder), StopOnSignal()],
    )


def train(recipe: Recipe, folder: Path, *, resume: bool = False, init_from: str | None = None) -> Path:
    """Train and save; returns the folder of the final model."""
    found = checkpoints.newest_complete(folder)
    if not resume and found is not None:
        raise ValueError(f"{folder} has checkpoints already; pass --resume to go on from {found.name}, or another --out")
    recipe.accumulation(int(os.environ.get("WORLD_SIZE", "1")))  # says what is wrong before the data is prepared
    _keep_recipe(recipe, folder, resume=found is not None)
    transformers.logging.disable_progress_bar()  # a bar for every checkpoint otherwise
    prepared = prepare(recipe.data)
    model = build_model(recipe, prepared, init_from)
    trainer = build_trainer(recipe, folder, prepared, model)
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(found) if found is not None else None)
    if trainer.state.global_step < recipe.training.steps:
        return folder  # stopped by a signal: the checkpoint is there
    return _save_final(trainer, folder)


def _keep_recipe(recipe: Recipe, folder: Path, *, resume: bool) -> None:
    """The effective recipe lies beside the checkpoints; a run goes on with its own one, except for how long and how often."""
    path, content = folder / "recipe.json", recipe.to_dict()
    if resume and path.exists():
        before = json.loads(path.read_text())
        for section in ("model", "data", "training"):
            for key in sorted(set(before[section]) | set(content[section])):
                old, new = before[section].get(key), content[section].get(key)
                if old != new and key not in FREE_ON_RESUME:
                    raise ValueError(
                        f"{section}.{key} is {new!r}, but the run in {folder} has {old!r}; resume it as it is, or use --init-from"
                    )
        if before["training"]["steps"] != recipe.training.steps and recipe.training.decay_steps is None and _is_main():
            print(f"the cosine ends at step {recipe.training.steps} now, not {before['training']['steps']}: the learning rate jumps")
    if _is_main():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.remove_unfinished(folder)
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(path)


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
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as training.steps=100")
    parser.add_argument("--out", metavar="FOLDER", help="where the run lives (default: runs/NAME)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint, if there is one")
    parser.add_argument("--init-from", metavar="FOLDER", help="begin a new run with the weights of a saved model")


def main(args: argparse.Namespace) -> None:
    recipe = load_recipe(args.recipe, args.set)
    if args.resume and args.init_from:
        raise ValueError("--resume goes on with a run, --init-from begins a new one with its weights; give one of them")
    folder = Path(args.out) if args.out else Path("runs") / recipe.name
    try:
        final = train(recipe, folder, resume=args.resume, init_from=args.init_from)
    except (BadLossError, OSError) as error:
        raise ValueError(error) from error
    if _is_main():
        print(f"saved in {final}", flush=True)
