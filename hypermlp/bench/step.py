"""A training step to put on the clock."""

import itertools
from collections.abc import Callable

import torch
from torch.optim import AdamW
from torch.utils.data import default_collate
from transformers import set_seed

from hypermlp.models import HyperMLPForCausalLM
from hypermlp.train.data import PreparedData, Sequences
from hypermlp.train.recipe import Recipe
from hypermlp.train.schedule import optimizer_groups

BATCHES = 8  # different ones, taken in turn


def training_step(recipe: Recipe, prepared: PreparedData) -> Callable[[], None]:
    """One micro-batch, whole: forward, loss, backward, clipping, AdamW."""
    set_seed(recipe.training.seed)
    training = recipe.training
    model = HyperMLPForCausalLM(recipe.model_config(len(prepared.tokenizer))).train()
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    first, second = training.betas
    optimizer = AdamW(
        optimizer_groups(model, training), training.learning_rate, (first, second), training.eps
    )
    sequences = Sequences(
        prepared, "train", recipe.data, count=BATCHES * training.micro_batch, seed=training.seed
    )
    chunks = [range(i * training.micro_batch, (i + 1) * training.micro_batch) for i in range(BATCHES)]
    batches = itertools.cycle([default_collate([sequences[i] for i in chunk]) for chunk in chunks])

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bfloat16"):
            loss = model(**next(batches), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
