"""Language models of a recipe side by side: training throughput, or all costs of every mixer."""

import copy
import itertools
import json
import math
from collections.abc import Mapping, Sequence

import torch
from torch.optim import AdamW
from torch.utils.data import default_collate
from transformers import DynamicCache, set_seed

from hypermlp.bench.measure import (
    WARMUPS,
    Row,
    Work,
    forward_pass,
    interleaved_medians,
    peak_bytes,
    random_tokens,
)
from hypermlp.costs.model import forward_flops_per_token, model_parameters, model_state_bytes
from hypermlp.costs.profiler import flops_seen
from hypermlp.layers.registry import chosen_mixers
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.reporting.table import Columns, Table
from hypermlp.train.data import PreparedData, Sequences
from hypermlp.train.recipe import Recipe, load_recipe
from hypermlp.train.schedule import optimizer_groups

BATCHES = 8  # different batches, used in turn
COST_COLUMNS: Columns = [
    ("mixer", "{mixer}"),
    ("parameters", "{parameters:,}"),
    ("forward, ms", "{forward_ms:.0f}"),
    ("layer, ms", "{layer_ms:.1f}"),
    ("training step, ms", "{train_ms:.0f}"),
    ("tokens/s", "{train_tokens_per_second:,.0f}"),
    ("decode, ms/token", "{decode_ms:.2f}"),
    ("MFLOPs/token", "{forward_mflops_per_token:.2f}"),
    ("profiler's", "{profiler_mflops_per_token:.2f}"),
    ("state, KiB", lambda row: f"{row['state_bytes'] / 2**10:,.0f}"),
    ("peak, MiB", lambda row: f"{row['train_peak_bytes'] / 2**20:,.0f}"),
]


def rival_recipes(
    name: str, changes: Sequence[str], rivals: Sequence[str], heads: Sequence[int]
) -> dict[str, Recipe]:
    """Return the recipe itself, then the same with every softmax label and number of heads."""
    ours = load_recipe(name, changes)
    return {str(ours.model.get("mixer", "G-cg-q-12o")): ours} | {
        f"{label}, {count} heads": _with_mixer(name, changes, label, f"model.num_heads={count}")
        for label, count in itertools.product(rivals, heads)
    }


def mixer_recipes(name: str, changes: Sequence[str], mixers: Sequence[str]) -> dict[str, Recipe]:
    """Return the recipe with each mixer. Raises UserError if a mixer does not fit, before anything runs."""
    recipes = {mixer: _with_mixer(name, changes, mixer) for mixer in chosen_mixers(list(mixers))}
    for recipe in recipes.values():
        recipe.model_config(256)
    return recipes


def _with_mixer(name: str, changes: Sequence[str], mixer: str, *more: str) -> Recipe:
    return load_recipe(name, [*changes, f"model.mixer={json.dumps(mixer)}", *more])


def throughput(
    recipes: Mapping[str, Recipe], prepared: PreparedData, *, rounds: int, seconds: float
) -> list[Row]:
    """Return a row for each recipe: milliseconds of a training step, and tokens per second."""
    times = interleaved_medians(
        {name: training_step(recipe, prepared) for name, recipe in recipes.items()},
        rounds=rounds,
        seconds=seconds,
    )
    return [
        {"mixer": name, "ms": 1000 * time, "tokens_per_second": step_tokens(recipes[name]) / time}
        for name, time in times.items()
    ]


def throughput_table(rows: list[Row]) -> Table:
    """Return the table. The first row is ours; the others show how many times as fast it trains."""

    def compared(row: Row) -> str:
        ratio = rows[0]["tokens_per_second"] / row["tokens_per_second"]
        return "" if row is rows[0] else f"{ratio:.2f} times as fast"

    columns: Columns = [
        ("mixer", "{mixer}"),
        ("ms per step", "{ms:.0f}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
        ("ours trains", compared),
    ]
    return Table.of(rows, columns)


def costs(recipes: Mapping[str, Recipe], prepared: PreparedData, *, rounds: int, seconds: float) -> list[Row]:
    """Return a row with all costs for each recipe. Each of the four timings interleaves all recipes."""
    vocab_size = len(prepared.tokenizer)
    models = {
        name: HyperMLPForCausalLM(recipe.model_config(vocab_size)).eval() for name, recipe in recipes.items()
    }
    steps = {name: training_step(recipe, prepared) for name, recipe in recipes.items()}
    kinds = (
        {
            name: forward_pass(model, random_tokens(vocab_size, *_shape(recipes[name])))
            for name, model in models.items()
        },
        {name: _decode(model, recipes[name], rounds) for name, model in models.items()},
        {name: _layer(model, recipes[name]) for name, model in models.items()},
        steps,
    )
    forward, decode, layer, train = (
        interleaved_medians(works, rounds=rounds, seconds=seconds / len(kinds)) for works in kinds
    )
    return [
        {
            "mixer": name,
            "parameters": model_parameters(model.config),
            "forward_ms": 1000 * forward[name],
            "layer_ms": 1000 * layer[name],
            "train_ms": 1000 * train[name],
            "train_tokens_per_second": step_tokens(recipes[name]) / train[name],
            "decode_ms": 1000 * decode[name],
            "forward_mflops_per_token": forward_flops_per_token(model.config, context) / 1e6,
            # The paper counts with PyTorch's profiler, and without the head.
            "profiler_mflops_per_token": flops_seen(forward_pass(model.model, tokens)) / context / 1e6,
            "state_bytes": model_state_bytes(model.config, context),
            "train_peak_bytes": peak_bytes(steps[name]),
        }
        for name, model in models.items()
        for context in [recipes[name].data.context]
        for tokens in [random_tokens(vocab_size, 1, context)]
    ]


def cost_table(rows: list[Row]) -> Table:
    """Return the table of rows that ``costs`` returned."""
    return Table.of(rows, COST_COLUMNS)


def _shape(recipe: Recipe) -> tuple[int, int]:
    """Return the sequences and positions of one timed step, which is one micro-batch."""
    return recipe.training.micro_batch, recipe.data.context


def step_tokens(recipe: Recipe) -> int:
    """Return the tokens of one timed step."""
    return math.prod(_shape(recipe))


def training_step(recipe: Recipe, prepared: PreparedData) -> Work:
    """Return a whole training step on one micro-batch: forward, loss, backward, clipping, AdamW."""
    training, size = recipe.training, recipe.training.micro_batch
    set_seed(training.seed)
    model = HyperMLPForCausalLM(recipe.model_config(len(prepared.tokenizer))).train()
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    groups, (first, second) = optimizer_groups(model, training), training.betas
    optimizer = AdamW(groups, training.learning_rate, (first, second), training.eps)
    sequences = Sequences(prepared, "train", recipe.data, count=BATCHES * size, seed=training.seed)
    batches = itertools.cycle(
        [default_collate([sequences[i * size + j] for j in range(size)]) for i in range(BATCHES)]
    )

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bfloat16"):
            loss = model(**next(batches), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _layer(model: HyperMLPForCausalLM, recipe: Recipe) -> Work:
    """Return the forward and backward pass of one mixer alone."""
    layer = copy.deepcopy(model.model.layers[0].mixer).train()
    x = torch.randn(*_shape(recipe), model.config.hidden_size, requires_grad=True)
    return lambda: layer(x).sum().backward()


def _decode(model: HyperMLPForCausalLM, recipe: Recipe, rounds: int) -> Work:
    """Return a decoding step of one sequence. Every call decodes the next token of the context."""
    tokens = random_tokens(model.config.vocab_size, 1, recipe.data.context)
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def decode(count: int) -> None:
        begin = cache.get_seq_length()
        model(tokens[:, begin : begin + count], past_key_values=cache)

    decode(recipe.data.context - rounds - WARMUPS)
    return lambda: decode(1)
