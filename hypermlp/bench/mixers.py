"""``hypermlp bench lm --mixer all``: one model of a recipe with every mixer, side by side. Our form of the paper's efficiency table."""

import copy
import json
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hypermlp.bench import columns
from hypermlp.bench.columns import Column
from hypermlp.bench.measure import WARMUPS, Work, interleaved_medians, peak_bytes
from hypermlp.bench.profiler import flops_seen
from hypermlp.bench.step import training_step
from hypermlp.costs.mixer import state_bytes
from hypermlp.costs.model import forward_flops_per_token, model_parameters
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.train.data import PreparedData
from hypermlp.train.recipe import Recipe, load_recipe

COLUMNS = [
    Column("mixer", lambda row: row["mixer"]),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("forward, ms", lambda row: f"{row['forward_ms']:.0f}"),
    Column("layer, ms", lambda row: f"{row['layer_ms']:.1f}"),
    Column("training step, ms", lambda row: f"{row['train_ms']:.0f}"),
    Column("tokens/s", lambda row: f"{row['train_tokens_per_second']:,.0f}"),
    Column("decode, ms/token", lambda row: f"{row['decode_ms']:.2f}"),
    Column("MFLOPs/token", lambda row: f"{row['forward_mflops_per_token']:.2f}"),
    Column("profiler's", lambda row: f"{row['profiler_mflops_per_token']:.2f}"),
    Column("state, KiB", lambda row: f"{row['state_bytes'] / 2**10:,.0f}"),
    Column("peak, MiB", lambda row: f"{row['train_peak_bytes'] / 2**20:,.0f}"),
]


def measure(
    recipe_name: str,
    changes: list[str],
    mixers: list[str],
    prepared: PreparedData,
    *,
    rounds: int,
    seconds: float,
) -> list[Any]:
    """A row for each mixer; every kind of time is taken in turn over all of them."""
    recipes = {
        mixer: load_recipe(recipe_name, [*changes, f"model.mixer={json.dumps(mixer)}"]) for mixer in mixers
    }
    share = seconds / 4
    vocab_size = len(prepared.tokenizer)
    models = {
        mixer: HyperMLPForCausalLM(recipe.model_config(vocab_size)).eval()
        for mixer, recipe in recipes.items()
    }
    forward = interleaved_medians(
        {m: _forward(models[m], recipes[m]) for m in mixers}, rounds=rounds, seconds=share
    )
    decode = interleaved_medians(
        {m: _decode(models[m], recipes[m], rounds) for m in mixers}, rounds=rounds, seconds=share
    )
    layer = interleaved_medians(
        {m: _layer(models[m], recipes[m]) for m in mixers}, rounds=rounds, seconds=share
    )
    steps = {mixer: training_step(recipe, prepared) for mixer, recipe in recipes.items()}
    train = interleaved_medians(steps, rounds=rounds, seconds=share)
    rows = []
    for mixer, recipe in recipes.items():
        config, context = models[mixer].config, recipe.data.context
        rows.append(
            {
                "mixer": mixer,
                "parameters": model_parameters(config),
                "forward_ms": 1000 * forward[mixer],
                "layer_ms": 1000 * layer[mixer],
                "train_ms": 1000 * train[mixer],
                "train_tokens_per_second": recipe.training.micro_batch * context / train[mixer],
                "decode_ms": 1000 * decode[mixer],
                "forward_mflops_per_token": forward_flops_per_token(config, context) / 1e6,
                "profiler_mflops_per_token": profiler_flops(models[mixer], recipe) / 1e6,
                "state_bytes": sum(
                    state_bytes(config.mixer_config(i), context) for i in range(config.num_hidden_layers)
                ),
                "train_peak_bytes": peak_bytes(steps[mixer]),
            }
        )
    return rows


def _tokens(config: HyperMLPConfig, *shape: int) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def _forward(model: HyperMLPForCausalLM, recipe: Recipe) -> Work:
    tokens = _tokens(model.config, recipe.training.micro_batch, recipe.data.context)

    @torch.no_grad()
    def work() -> None:
        model(tokens, use_cache=False)

    return work


def _layer(model: HyperMLPForCausalLM, recipe: Recipe) -> Work:
    """One mixer alone, forward and backward, on a micro-batch."""
    layer = copy.deepcopy(model.model.layers[0].mixer).train()
    x = torch.randn(
        recipe.training.micro_batch, recipe.data.context, model.config.hidden_size, requires_grad=True
    )

    def work() -> None:
        layer(x).sum().backward()

    return work


def _decode(model: HyperMLPForCausalLM, recipe: Recipe, rounds: int) -> Work:
    """One token after another up to the end of the context, one sequence."""
    tokens = _tokens(model.config, 1, recipe.data.context)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(tokens[:, : -rounds - WARMUPS], past_key_values=cache)

    @torch.no_grad()
    def work() -> None:
        at = cache.get_seq_length()
        model(tokens[:, at : at + 1], past_key_values=cache)

    return work


def profiler_flops(model: HyperMLPForCausalLM, recipe: Recipe) -> float:
    """What the paper counted, per token: PyTorch's profiler, without the head; operators that it does not know cost nothing."""
    tokens = _tokens(model.config, 1, recipe.data.context)
    with torch.no_grad():
        return flops_seen(lambda: model.model(tokens, use_cache=False)) / tokens.shape[1]


def table(rows: list[dict[str, Any]]) -> str:
    return columns.table(rows, COLUMNS)
