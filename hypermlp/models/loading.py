"""Find and load saved models: Hugging Face folders, and the checkpoints of a training run.

hypermlp/sealed.py writes and verifies checkpoints.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from hypermlp.checkpoints import MODELS, find_shipped
from hypermlp.errors import UserError, first_line
from hypermlp.models.configuration_hypermlp import HyperMLPConfig
from hypermlp.models.modeling_hypermlp import HyperMLPForCausalLM
from hypermlp.models.parameters import require_memory
from hypermlp.sealed import SEAL, changed_weights, newest_complete
from hypermlp.validation import LARGEST_SIZE, is_integer, near_miss

MODEL_NAMES = (
    "a folder of save_pretrained, a checkpoint, a run of `hypermlp train`, or "
    f"{' or '.join(MODELS.values())}, which come with the package"
)


def model_folder(name: str) -> Path:
    """Return the folder of a saved model: ``name``, or, for a run, its final model or newest checkpoint.

    ``name`` may also be that of a model that comes with the package, unless it is a folder here.
    """
    run, shipped = Path(name), find_shipped(name)
    if shipped is not None and not run.is_dir():
        return shipped
    for folder in (run, run / "final"):
        if (folder / "config.json").is_file():
            return folder
    newest = newest_complete(run)
    if newest is None and (run / "recipe.json").is_file():
        raise UserError(
            f"{name} has no checkpoint: a training saves one after every training.save_every steps, when it "
            "is stopped, and at its end; wait for it, or continue it with --resume"
        )
    if newest is None:
        note = "" if run.is_dir() else near_miss(name, MODELS.values())
        raise UserError(
            f"{name} {'has no model' if run.is_dir() else 'is not a folder'}{note}; allowed: {MODEL_NAMES}"
        )
    return newest


def is_local(name: str) -> bool:
    """Return whether ``name`` is a folder here or (nearly) that of a shipped model, not one of the hub."""
    return Path(name).is_dir() or find_shipped(name) is not None or bool(near_miss(name, MODELS.values()))


def our_config(name: str) -> HyperMLPConfig:
    """Return the configuration of a saved model, given as for ``model_folder`` or by its config.json."""
    path = Path(name) if Path(name).is_file() else model_folder(name) / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not the configuration of a model: {error}") from error
    if kind != HyperMLPConfig.model_type:
        raise UserError(f"{path} is of a model of type {kind!r}; allowed: {HyperMLPConfig.model_type!r}")
    try:
        return HyperMLPConfig.from_pretrained(path)
    except Exception as error:  # transformers raises its own errors for wrong types
        raise UserError(f"{path} is not the configuration of a model: {first_line(error)}") from error


def require_whole(name: str, model: Any, info: dict[str, Any]) -> None:
    """Raise if a model lacks tensors, which transformers fills with random values, or has non-finite ones.

    ``info`` is the loading info that ``from_pretrained(..., output_loading_info=True)`` returns.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{name} lacks {', '.join(missing[:3])}{more}: it is not whole")
    broken = [key for key, value in model.named_parameters() if not torch.isfinite(value).all()]
    if broken:
        raise UserError(
            f"{name} has values that are not finite, first in {broken[0]}: "
            "the file is damaged, or the training diverged"
        )


def load(name: str) -> tuple[HyperMLPForCausalLM, Any]:
    """Return a saved model in evaluation mode, and its tokenizer; ``name`` is as for ``model_folder``."""
    folder = model_folder(name)
    config = our_config(str(folder))
    require_memory(config, str(folder / "config.json"))
    try:
        loaded: Any = HyperMLPForCausalLM.from_pretrained(folder, config=config, output_loading_info=True)
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"the weights in {folder} cannot be loaded: {first_line(error)}. They are damaged, or do not fit "
            "config.json; restore the folder, or take another checkpoint"
        ) from error
    model: HyperMLPForCausalLM = loaded[0].eval()
    require_whole(name, model, loaded[1])
    changed = changed_weights(folder)
    if changed is not None:
        raise UserError(
            f"{folder / changed} is not what was saved: its checksum differs from {SEAL}. Restore the file, "
            f"or take another checkpoint; if you changed it on purpose, remove {folder / SEAL}"
        )
    _check_generation_config(model.generation_config, folder / "generation_config.json")
    if not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} has no tokenizer; save one there with tokenizer.save_pretrained")
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded: {first_line(error)}; restore tokenizer.json and "
            "tokenizer_config.json"
        ) from error


def _check_generation_config(config: Any, path: Path) -> None:
    """Raise for values of the file with which ``generate`` would end in an error that does not name them."""

    def check(setting: str, value: Any, fits: bool, allowed: str) -> None:
        if value is not None and not fits:
            raise UserError(f"{path} cannot be used: {setting} is {value!r}; it must be {allowed}")

    for setting in ("num_beams", "num_return_sequences"):
        value: Any = getattr(config, setting, None)
        check(setting, value, is_integer(value) and value > 0, "a whole number, 1 or more")
    for setting in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, setting, None)
        ids: list[Any] = value if isinstance(value, list) else [value]
        fits = all(is_integer(one) and abs(one) < LARGEST_SIZE for one in ids)
        check(setting, value, fits, "the number of a token, or a list of them")
