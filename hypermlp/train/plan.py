"""``hypermlp plan``: what a recipe will need, before anything is bought. The formulas are explained in docs/train.md."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from hypermlp.budget import forward_flops, parameter_count
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.ops.backends import use_backend
from hypermlp.train.recipe import Recipe, load_recipe

GPUS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "l40s": 362e12, "b200": 2250e12}  # dense bfloat16 FLOP/s, by the makers
WEIGHT_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8  # float32 masters, gradients, AdamW's two moments
GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """Of one training run; memory of one process."""

    parameters: int
    softmax_parameters: int  # of the same model with attention
    state_bytes: int
    activation_bytes: int
    flops_per_token: int  # forward and backward
    tokens: int
    steps: int
    accumulation: int
    seconds: float


def model_parameters(config: HyperMLPConfig) -> int:
    layers = sum(parameter_count(config.mixer_config(i)) + _mlp(config) + 2 * config.hidden_size for i in range(config.num_hidden_layers))
    tables = config.vocab_size * (1 if config.tie_word_embeddings else 2) + config.max_position_embeddings * config.learned_positions
    return layers + (tables + 1) * config.hidden_size


def forward_flops_per_token(config: HyperMLPConfig, length: int) -> int:
    """The mean over a sequence of this length; two per multiply-add, only pairs that see each other."""
    mixers = sum(forward_flops(config.mixer_config(i), length) for i in range(config.num_hidden_layers)) // length
    return mixers + 2 * config.num_hidden_layers * _mlp(config) + 2 * config.hidden_size * config.vocab_size


def _mlp(config: HyperMLPConfig) -> int:
    assert config.intermediate_size is not None
    return (2 if config.block == "gpt2" else 3) * config.hidden_size * config.intermediate_size


def activation_bytes(recipe: Recipe, config: HyperMLPConfig) -> int:
    """What the forward pass of a micro-batch keeps for the backward pass: the model runs without contents, in the backend of GPUs."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # so that no storage is taken for another
    with FakeTensorMode(), use_backend("blocked"), torch.autocast("cpu", torch.bfloat16, enabled=recipe.training.precision == "bfloat16"):
        model = HyperMLPForCausalLM(config).train()
        if recipe.training.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        tokens = torch.zeros(recipe.training.micro_batch, recipe.data.context, dtype=torch.int64)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        with saved_tensors_hooks(note, lambda tensor: tensor):
            model(tokens, labels=tokens, shift_labels=tokens, use_cache=False)
    return sum(size for key, size in kept.items() if key not in weights)


def needs(recipe: Recipe, *, vocab_size: int, peak: float, count: int, utilisation: float) -> Needs:
    config = recipe.model_config(vocab_size)
    parameters = model_parameters(config)
    softmax = HyperMLPConfig(**(config.to_diff_dict() | {"mixer": "S-p"}))
    share = count if recipe.training.sharding else 1
    passes = 4 if recipe.training.gradient_checkpointing else 3  # the backward pass costs two forward ones, recomputing one more
    flops = passes * forward_flops_per_token(config, recipe.data.context)
    tokens = recipe.training.steps * recipe.training.batch_tokens
    return Needs(
        parameters=parameters,
        softmax_parameters=model_parameters(softmax),
        state_bytes=(WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES) * parameters // share,
        activation_bytes=activation_bytes(recipe, config),
        flops_per_token=flops,
        tokens=tokens,
        steps=recipe.training.steps,
        accumulation=recipe.accumulation(count),
        seconds=flops * tokens / (peak * count * utilisation),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of one in recipes/")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS), help="default: h100")
    parser.add_argument("--count", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--utilisation", type=float, default=0.3, help="share of the GPU's peak that is reached (default: 0.3, a guess)")
    parser.add_argument("--vocab", type=int, default=257, help="the tokenizer's size, where the recipe gives no model.vocab_size")


def main(args: argparse.Namespace) -> None:
    if args.count < 1 or not 0 < args.utilisation <= 1 or args.vocab < 1:
        raise ValueError("--count and --vocab must be at least 1, --utilisation above 0 and at most 1")
    recipe = load_recipe(args.recipe, args.set)
    vocab = int(recipe.model.get("vocab_size", args.vocab))
    found = needs(recipe, vocab_size=vocab, peak=GPUS[args.gpu], count=args.count, utilisation=args.utilisation)
    print(f"{recipe.name} on {args.count} x {args.gpu}\n{table(found, recipe, args)}")


def duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.2g} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"


def table(found: Needs, recipe: Recipe, args: argparse.Namespace) -> str:
    """Markdown."""
    more = found.parameters / found.softmax_parameters - 1
    sharded = f", {args.count} processes share it" if recipe.training.sharding else ", on every process"
    sequences = f"{found.accumulation} x {recipe.training.micro_batch}"
    rows = [
        ("parameters", f"{found.parameters:,} ({more:+.2%} against softmax attention)"),
        ("weights, gradients, optimizer", f"{found.state_bytes / GIB:.2g} GiB per GPU{sharded}"),
        ("activations", f"{found.activation_bytes / GIB:.2g} GiB for a micro-batch of {recipe.training.micro_batch}"),
        ("training FLOPs per token", f"{found.flops_per_token / 1e9:.3g} G"),
        (
            "tokens",
            f"{found.tokens / 1e9:.3g} B in {found.steps:,} steps of {sequences} sequences on each GPU",
        ),
        ("time", f"{duration(found.seconds)} at {args.utilisation:.0%} of {GPUS[args.gpu] / 1e12:,.0f} TFLOP/s"),
    ]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])
