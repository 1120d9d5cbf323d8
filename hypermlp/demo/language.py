"""A small language model learns Python from the standard library, and decodes with and without its cache."""

from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.loading import load
from hypermlp.reporting.sources import Curve, read_run
from hypermlp.train.data import prepare
from hypermlp.train.recipe import Recipe
from hypermlp.train.run import build_model, train

PREFILL = 20
SAMPLING = {"max_new_tokens": 160, "do_sample": True, "temperature": 0.8, "top_k": 50}


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> str:
    """Return a text that begins with ``def``, always drawn with the same seed."""
    set_seed(0)
    inputs = tokenizer("def ", return_tensors="pt")
    written = model.generate(**inputs, **SAMPLING, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(written[0], skip_special_tokens=True))


def sample_untrained(recipe: Recipe) -> str:
    """Return a text that the recipe's model generates before training."""
    prepared = prepare(recipe.data)
    return sample(build_model(recipe, prepared, None).eval(), prepared.tokenizer)


def learn(recipe: Recipe, folder: Path) -> tuple[HyperMLPForCausalLM, Any, Curve]:
    """Train the recipe's model, or go on with it; return it with its tokenizer and its validation losses."""
    final = train(recipe, folder, resume=True)
    if final == folder:
        raise UserError(f"the training was stopped; `hypermlp demo --out {folder.parent}` continues it")
    return *load(str(final)), read_run(folder).validation


@torch.no_grad()
def cache_error(model: HyperMLPForCausalLM, tokenizer: Any, text: str) -> float:
    """Return the largest difference of a log-probability between one forward pass and cached decoding.

    Cached decoding reads the first PREFILL tokens at once and the rest token by token.
    """
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    cache, parts = None, []
    for chunk in (tokens[:, :PREFILL], *tokens[:, PREFILL:].split(1, dim=1)):
        outputs = model(chunk, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    difference = torch.cat(parts, dim=1).log_softmax(-1) - model(tokens).logits.log_softmax(-1)
    return float(difference.abs().max())
