"""Small models on bytes, as tests save and load them."""

from pathlib import Path
from typing import Any

import torch

from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.train.tokenization import build_tokenizer, save_tokenizer

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}


def byte_model(*, seed: int = 0, **settings: Any) -> tuple[HyperMLPForCausalLM, Any]:
    """Return an untrained model, with SIZES but for ``settings``, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer("bytes", [])
    marks = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    config = HyperMLPConfig(**{**SIZES, "vocab_size": len(tokenizer), **marks, **settings})
    return HyperMLPForCausalLM(config).eval(), tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save a model with its tokenizer; return the folder."""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder
