"""A small language model learns Python from Python's own source, and decodes with its cache as without."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, set_seed

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.data import prepare
from hypermlp.train.recipe import Recipe
from hypermlp.train.run import build_model, train

PROMPT = "def "
WRITTEN = 160  # tokens of a sample


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> str:
    set_seed(0)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    settings = {
        "max_new_tokens": WRITTEN,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text: str = tokenizer.decode(model.generate(**inputs, **settings)[0], skip_special_tokens=True)
    return text


def sample_untrained(recipe: Recipe) -> str:
    prepared = prepare(recipe.data)
    return sample(build_model(recipe, prepared, None).eval(), prepared.tokenizer)


def learn(recipe: Recipe, folder: Path) -> tuple[HyperMLPForCausalLM, Any, float]:
    """The trained model, its tokenizer and its validation loss."""
    final = train(recipe, folder)
    if final == folder:
        raise UserError("the training was stopped")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [record["eval_validation_loss"] for record in records if "eval_validation_loss" in record][-1]
    return HyperMLPForCausalLM.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final), loss


@torch.no_grad()
def cache_error(model: HyperMLPForCausalLM, tokenizer: Any, text: str, prefill: int = 20) -> float:
    """Largest difference of a log-probability: all of the text at once, or a prefix and then token by token."""
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    whole = model(tokens).logits.log_softmax(-1)
    outputs = model(tokens[:, :prefill], use_cache=True)
    parts = [outputs.logits]
    for t in range(prefill, tokens.shape[1]):
        outputs = model(tokens[:, t : t + 1], past_key_values=outputs.past_key_values, use_cache=True)
        parts.append(outputs.logits)
    return float((torch.cat(parts, dim=1).log_softmax(-1) - whole).abs().max())
