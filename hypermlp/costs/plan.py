"""What a training run needs on given GPUs: memory, FLOPs and time. docs/train.md explains the formulas."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hypermlp.costs.model import (
    forward_flops_per_token,
    largest_layer,
    model_flops_table,
    model_parameters,
    model_state_bytes,
    step_bytes,
    with_softmax,
)
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig
from hypermlp.models.loading import our_config
from hypermlp.reporting.table import Table
from hypermlp.train.recipe import Recipe, load_recipe

GIB = 2**30
TEMPLATE = "lm-340m"  # the recipe whose data and training settings a model without a recipe gets
USABLE = 0.95  # share of a GPU's memory; the driver and fragmentation take the rest
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 4, 8  # per parameter: float32, and AdamW's two moments


class Gpu(NamedTuple):
    """Figures as the vendors publish them, written down from memory.

    No datasheet was at hand; compare them with that of your GPU before you rely on a plan.
    """

    flops: float
    """Dense bfloat16 FLOPs per second."""
    float32: float
    """float32 FLOPs per second, without tensor cores."""
    memory: int
    """Memory in GiB."""
    link: float
    """Bytes per second to the other GPUs of a node, one way: NVLink, or PCIe for the L40S."""
    network: float
    """Bytes per second to other nodes: one adapter of 200 or 400 Gbit/s for each GPU."""


GPUS = {
    "a100": Gpu(312e12, 19.5e12, 80, 300e9, 25e9),
    "h100": Gpu(989e12, 67e12, 80, 450e9, 50e9),
    "h200": Gpu(989e12, 67e12, 141, 450e9, 50e9),
    "l40s": Gpu(362e12, 91.6e12, 48, 32e9, 25e9),
    "b200": Gpu(2250e12, 80e12, 180, 900e9, 50e9),
}


FLOAT32_PARTS = ("mix1", "mix2")
"""Parts of the operator that are multiplied in float32, in bfloat16 training too."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The needs of one training run. Memory and times are those of one GPU."""

    parameters: int
    softmax_parameters: int
    """Parameters of the same model with softmax attention."""
    forward_flops_per_token: int
    training_flops_per_token: int
    mixer_share: float
    """Fraction of the forward FLOPs that the mixers take."""
    held_bytes: int
    """Weights and optimizer state, held all the time."""
    step_bytes: int
    """The most that a step holds besides: gradients, activations, logits and buffers."""
    memory_bytes: int
    """Memory of the GPU."""
    tokens: int
    steps: int
    micro_batch: int
    """The recipe's micro-batch, or the largest smaller one that divides the batch evenly."""
    accumulation: int
    arithmetic_seconds: float
    """Time of a step's FLOPs at the assumed utilisation."""
    float32_share: float
    """Fraction of the FLOPs that are float32 products."""
    communication_seconds: float
    """Time of a step's communication."""
    decode_bytes_per_token: int
    """Decoding state per position of context, in bfloat16."""
    softmax_decode_bytes_per_token: int

    @property
    def step_seconds(self) -> float:
        """Time of a step: communication overlaps with arithmetic."""
        return max(self.arithmetic_seconds, self.communication_seconds)

    @property
    def seconds(self) -> float:
        """Time of the run."""
        return self.steps * self.step_seconds

    @property
    def fits(self) -> bool:
        """Whether the run fits the GPU's memory."""
        return self.held_bytes + self.step_bytes <= USABLE * self.memory_bytes

    @property
    def limit(self) -> str:
        """What limits the run, and what to change."""
        if not self.fits:
            return (
                "memory: it does not fit; lower training.micro_batch, or set training.gradient_checkpointing "
                "or training.sharding"
            )
        if self.communication_seconds > self.arithmetic_seconds:
            return "communication: fewer or better connected GPUs, or a larger training.batch_tokens"
        return "arithmetic: more or faster GPUs, or better kernels (--utilisation)"


def make_plan(
    recipe: Recipe,
    *,
    vocab_size: int,
    gpu: Gpu,
    count: int,
    nodes: int,
    utilisation: float,
    on_progress: Callable[[float], None] | None = None,
) -> Plan:
    """Return the plan of a recipe on ``count`` GPUs in ``nodes`` machines.

    ``vocab_size`` is the tokenizer's size, ``utilisation`` the fraction of the GPU's peak that is reached.
    ``on_progress`` is called with the finished fraction of the work.
    """
    config, recipe = recipe.model_config(vocab_size), even(recipe, count)
    training, context = recipe.training, recipe.data.context
    parameters, softmax = model_parameters(config), with_softmax(config)
    accumulation = recipe.accumulation(count)
    forward, parts = forward_flops_per_token(config, context), model_flops_table(config, context)
    # The backward pass costs two forward passes, recomputing blocks another one.
    passes = 4 if training.gradient_checkpointing else 3
    training_flops = passes * forward
    slow = sum(flops for part, flops in parts.items() if in_float32(part, recipe))
    fast = sum(parts.values()) - slow
    # Seconds of a token on one GPU at its peak.
    token = passes * (fast / gpu.flops + slow / gpu.float32) / context
    held, gradients = (WEIGHT_BYTES + OPTIMIZER_BYTES) * parameters, GRADIENT_BYTES * parameters
    # Every GPU but one passes on what it has; a ring sums gradients in two rounds.
    sent = 2 * gradients * (count - 1) / count
    if training.sharding:
        gathered = 2 * WEIGHT_BYTES * largest_layer(config)  # the current block and the next one
        # 2 micro-batches: all gradients are present, of which each GPU keeps its shard.
        in_step = (
            step_bytes(recipe, config, 2, on_progress=on_progress) - gradients + gradients // count + gathered
        )
        held //= count
        # For every micro-batch, weights are gathered for both passes, and gradients scattered.
        sent *= 3 / 2 * accumulation
    else:
        in_step = step_bytes(recipe, config, accumulation, on_progress=on_progress)
    return Plan(
        parameters=parameters,
        softmax_parameters=model_parameters(softmax),
        forward_flops_per_token=forward,
        training_flops_per_token=training_flops,
        mixer_share=sum(flops for part, flops in parts.items() if part.startswith("mixer"))
        / sum(parts.values()),
        held_bytes=held,
        step_bytes=in_step,
        memory_bytes=gpu.memory * GIB,
        tokens=training.steps * training.batch_tokens,
        steps=training.steps,
        micro_batch=training.micro_batch,
        accumulation=accumulation,
        arithmetic_seconds=token * training.batch_tokens / (count * utilisation),
        float32_share=slow / (slow + fast),
        communication_seconds=sent / (gpu.network if nodes > 1 else gpu.link),
        decode_bytes_per_token=model_state_bytes(config, context, torch.bfloat16) // context,
        softmax_decode_bytes_per_token=model_state_bytes(softmax, context, torch.bfloat16) // context,
    )


def in_float32(part: str, recipe: Recipe) -> bool:
    """Return whether the products of a part of the model, as in ``model_flops_table``, are float32."""
    if recipe.training.precision == "float32":
        return True
    return part.removeprefix("mixer: ") in FLOAT32_PARTS


def even(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe with the largest micro-batch, up to its own, that gives ``count`` GPUs equal work.

    If there is none, the recipe is returned as it is.
    """
    own = recipe.training.micro_batch
    size = next((s for s in range(own, 0, -1) if recipe.sequences_per_step % (s * count) == 0), own)
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, micro_batch=size))


def usual_nodes(count: int) -> int:
    """Return the smallest number of machines with at most eight GPUs each, equally many in every one."""
    return next(nodes for nodes in range(-(-count // 8), count + 1) if count % nodes == 0)


def recipe_of(place: str, changes: Sequence[str]) -> Recipe:
    """Return a recipe by its name or path, or a recipe for the model in a folder or of a config.json.

    The latter has the data and training settings of TEMPLATE. ``changes`` are ``section.key=value``.
    """
    path = Path(place)
    if not path.is_dir() and path.suffix != ".json":
        return load_recipe(place, changes)
    if any(change.startswith("model.") for change in changes):
        raise UserError(f"--set cannot change the model of {place}: name a recipe instead of a saved model")
    config, folder = our_config(place), path.resolve().parent if path.is_file() else path.resolve()
    own = [f"name={json.dumps(folder.name)}", f"data.context={config.max_position_embeddings}"]
    model = {key: getattr(config, key) for key in HyperMLPConfig.field_names()}
    return dataclasses.replace(load_recipe(TEMPLATE, [*own, *changes]), model=model)


def plan_table(plan: Plan, recipe: Recipe, count: int, gpu: Gpu, utilisation: float) -> Table:
    """Return a plan in words; the arguments are those of ``make_plan``."""
    training = recipe.training
    more = plan.parameters / plan.softmax_parameters - 1
    recomputing = ", including recomputation" if training.gradient_checkpointing else ""
    share = f"a shard of {plan.held_bytes * count / GIB:.1f} GiB" if training.sharding else "a copy"
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    batches = "1 micro-batch" if plan.accumulation == 1 else f"{plan.accumulation} micro-batches"
    own = training.micro_batch
    uneven = "" if plan.micro_batch == own else f" (the recipe's {own} do not divide the batch evenly)"
    rows = {
        "parameters": f"{plan.parameters:,} ({more:+.2%} against softmax attention)",
        "forward, FLOPs per token": f"{plan.forward_flops_per_token / 1e9:.4g} G, "
        f"{plan.mixer_share:.0%} of it in the mixers",
        "training, FLOPs per token": f"{plan.training_flops_per_token / 1e9:.4g} G{recomputing}",
        "weights and optimizer": f"{plan.held_bytes / GIB:.3g} GiB on each GPU: {share}",
        "gradients, activations, buffers": f"{plan.step_bytes / GIB:.3g} GiB at most, "
        f"with a micro-batch of {plan.micro_batch}",
        "memory": f"{(plan.held_bytes + plan.step_bytes) / GIB:.3g} of {plan.memory_bytes / GIB:.0f} GiB "
        f"on each GPU: {'fits' if plan.fits else 'does not fit'}",
        "tokens": f"{plan.tokens / 1e9:.4g} B in {plan.steps:,} steps of {training.batch_tokens:,}",
        "a step": f"{gpus} x {batches} x {plan.micro_batch} sequences of {recipe.data.context}{uneven}",
        "arithmetic of a step": f"{_short(plan.arithmetic_seconds)} at {utilisation:.0%} "
        f"of {_rates(plan, gpu)}",
        "communication of a step": f"{_short(plan.communication_seconds)}, overlapping with the arithmetic"
        if count > 1
        else "none",
        "time": _long(plan.seconds),
        "limited by": plan.limit,
        "decoding state": f"{plan.decode_bytes_per_token / 1024:.4g} KiB for each token of context "
        f"in bfloat16; softmax attention {plan.softmax_decode_bytes_per_token / 1024:.4g} KiB",
    }
    return Table(["quantity", "value"], [list(row) for row in rows.items()], frozenset({"value"}))


def _rates(plan: Plan, gpu: Gpu) -> str:
    """Return the peak of the GPU for the products of a plan."""
    bfloat16, float32 = (f"{rate / 1e12:,.4g} TFLOP/s" for rate in (gpu.flops, gpu.float32))
    if plan.float32_share in (0, 1):
        return f"{float32} in float32" if plan.float32_share else f"{bfloat16} in bfloat16"
    return f"{bfloat16} in bfloat16, and {float32} for the {plan.float32_share:.1%} in float32"


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _long(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.2g} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"
