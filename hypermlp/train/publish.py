"""Make the folder of a shipped model from a finished run: bfloat16 weights, tokenizer, recipe and model card.

    hypermlp train tiny --out runs/tiny
    python -m hypermlp.train.publish runs/tiny hypermlp/checkpoints/tiny

``card.json`` holds what the tests compare with, and README.md shows it.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from hypermlp import __version__
from hypermlp.checkpoints import HELD_OUT
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.loading import load
from hypermlp.reporting.sources import METRICS, read_metrics
from hypermlp.sealed import file_digest, put_in_place
from hypermlp.train.data import prepare
from hypermlp.train.folder import RunFolder
from hypermlp.train.recipe import Recipe

FIRST_STEPS = 20
CARD = "card.json"
TEMPLATE = Path(__file__).with_name("model_card.md")
VALIDATION = "eval_validation_loss"
BATCH = 32  # sequences
TITLES = {"G-cg-q-12o": "HyperGLU (G-cg-q-12o)", "S-p": "softmax attention with RoPE (S-p)"}


@torch.inference_mode()
def held_out_loss(name: str) -> float:
    """Return a model's loss on ``HELD_OUT`` in nats per token; ``name`` is as for ``model_folder``.

    The text is cut into sequences as long as the model's context, of which each sees only itself.
    """
    model, tokenizer = load(name)
    encoded = tokenizer(HELD_OUT.read_text(), add_special_tokens=False, verbose=False)
    tokens = torch.tensor(encoded["input_ids"])
    context = model.config.max_position_embeddings
    windows = tokens.unfold(0, context + 1, context)
    total = 0.0
    for batch in windows.split(BATCH):
        logits = model(batch[:, :-1]).logits.float()
        total += float(torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="sum"))
    return total / (windows.shape[0] * context)


def publish(run: Path, folder: Path) -> None:
    """Write the final model of ``run`` to ``folder``, replacing what is there."""
    recipe = RunFolder(run).recipe()
    if recipe is None:
        raise UserError(f"{run} is not a run of `hypermlp train`: it has no recipe.json")
    prepared = prepare(recipe.data)
    RunFolder(run).check_data(prepared.digest)
    metrics = read_metrics(run / METRICS)
    losses = {record["step"]: record["loss"] for record in metrics if "loss" in record}
    curve = [[record["step"], record[VALIDATION]] for record in metrics if VALIDATION in record]
    first = [losses[step] for step in range(1, FIRST_STEPS + 1) if step in losses]
    if len(first) < FIRST_STEPS:
        raise UserError(f"{run} has no loss for each of the first {FIRST_STEPS} steps; set log_every to 1")
    model, tokenizer = load(str(run))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        aside = Path(parent) / folder.name
        _save(model, tokenizer, aside)
        card = {
            "name": recipe.name,
            "parameters": model.num_parameters(),
            "validation_loss": curve[-1][1],
            "validation_curve": curve,
            "held_out_loss": held_out_loss(str(aside)),
            "first_losses": first,
            "sha256": file_digest(aside / "model.safetensors"),
            "data_digest": prepared.digest,
            "tokens": prepared.description["tokens"]["train"],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "hypermlp": __version__,
        }
        (aside / CARD).write_text(json.dumps(card, indent=1) + "\n")
        (aside / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
        (aside / "README.md").write_text(model_card(card, recipe, model.config))
        put_in_place(aside, folder)


def _save(model: HyperMLPForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Save a model rounded to bfloat16, with a configuration that loads it as float32."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_hypermlp.py").unlink()  # loads the package, which the folder is a part of
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors are written for their owner alone


def model_card(card: dict[str, Any], recipe: Recipe, config: Any) -> str:
    """Return the text of README.md in the folder of a shipped model."""
    losses = [f"{loss:.4f}" for loss in card["first_losses"]]
    lines = [", ".join(losses[i : i + 10]) for i in range(0, len(losses), 10)]
    shown = {"title": TITLES[config.mixer], "count": len(losses), "losses": ",\n".join(lines)}
    return TEMPLATE.read_text().format(**card, **shown, config=config, training=recipe.training)


def main(words: list[str]) -> None:
    """Publish a run (RUN FOLDER), or print a model's loss on the held-out file (MODEL)."""
    transformers.logging.disable_progress_bar()
    if len(words) == 1:
        print(f"{held_out_loss(words[0]):.4f} nats per byte on {HELD_OUT}")
    elif len(words) == 2:
        publish(Path(words[0]), Path(words[1]))
        print(f"wrote {words[1]}")
    else:
        raise SystemExit("usage: python -m hypermlp.train.publish RUN FOLDER, or MODEL for its held-out loss")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"hypermlp.train.publish: {error}") from None
