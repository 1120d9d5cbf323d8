"""``hypermlp plan``: what a recipe will need, before anything is bought. The formulas are explained in docs/train.md."""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hypermlp.costs.model import (
    STATE_BYTES,
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
from hypermlp.train.recipe import Recipe, load_recipe
from hypermlp.train.sample import our_config

GIB = 2**30
TEMPLATE = "lm-340m"  # how a model without a recipe is trained
USABLE = 0.95  # of a GPU's memory; the rest is the driver's, and lost between blocks


class Gpu(NamedTuple):
    """By the makers."""

    flops: float
    """Per second, dense bfloat16."""
    memory: int
    """GiB."""
    link: float
    """Bytes per second to the other GPUs of a node, one way: NVLink, or PCIe for the L40S."""
    network: float
    """Bytes per second to other nodes: one 200 or 400 Gbit/s adapter for each GPU."""


GPUS = {
    "a100": Gpu(312e12, 80, 300e9, 25e9),
    "h100": Gpu(989e12, 80, 450e9, 50e9),
    "h200": Gpu(989e12, 141, 450e9, 50e9),
    "l40s": Gpu(362e12, 48, 32e9, 25e9),
    "b200": Gpu(2250e12, 180, 900e9, 50e9),
}


@dataclass(frozen=True)
class Plan:
    """Of one training run; memory and times of one GPU."""

    parameters: int
    softmax_parameters: int
    """Of the same model with softmax attention."""
    forward_flops_per_token: int
    training_flops_per_token: int
    mixer_share: float
    """Of the forward FLOPs."""
    held_bytes: int
    """Weights and optimizer, all the time."""
    step_bytes: int
    """The most that a step holds beyond them: gradients, activations, logits, and what lies between."""
    memory_bytes: int
    """That of the GPU."""
    tokens: int
    steps: int
    micro_batch: int
    """The recipe's, or as many fewer as make the batch come out even."""
    accumulation: int
    arithmetic_seconds: float
    """Of a step."""
    communication_seconds: float
    decode_bytes_per_token: int
    """Of state for each position of context, bfloat16."""
    softmax_decode_bytes_per_token: int

    @property
    def step_seconds(self) -> float:
        """Communication runs beside the arithmetic."""
        return max(self.arithmetic_seconds, self.communication_seconds)

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def fits(self) -> bool:
        return self.held_bytes + self.step_bytes <= USABLE * self.memory_bytes

    @property
    def limit(self) -> str:
        """What to change if it is not enough."""
        if not self.fits:
            return "memory: it does not fit; lower training.micro_batch, or set training.gradient_checkpointing or training.sharding"
        if self.communication_seconds > self.arithmetic_seconds:
            return "communication: fewer or better connected GPUs, or a larger training.batch_tokens"
        return "arithmetic: more or faster GPUs, or better kernels (--utilisation)"


def make_plan(
    recipe: Recipe, *, vocab_size: int, gpu: Gpu, count: int, nodes: int, utilisation: float
) -> Plan:
    config = recipe.model_config(vocab_size)
    recipe = even(recipe, count)
    training, context = recipe.training, recipe.data.context
    parameters, softmax = model_parameters(config), with_softmax(config)
    accumulation = recipe.accumulation(count)
    forward = forward_flops_per_token(config, context)
    parts = model_flops_table(config, context)
    passes = (
        4 if training.gradient_checkpointing else 3
    )  # the backward pass costs two forward ones, recomputing one more
    held = (STATE_BYTES["weights"] + STATE_BYTES["optimizer"]) * parameters
    in_step = step_bytes(
        recipe, config, 2 if training.sharding else accumulation
    )  # 2: with all gradients, which are divided then
    if training.sharding:
        gradients = STATE_BYTES["gradients"] * parameters
        gathered = 2 * STATE_BYTES["weights"] * largest_layer(config)  # the block at work, and the next
        held, in_step = held // count, in_step - gradients + gradients // count + gathered
    sent = STATE_BYTES["gradients"] * parameters * (count - 1) / count
    # A ring sums gradients in two rounds; shards are gathered for both passes, and gradients scattered, for every micro-batch.
    sent *= 3 * accumulation if training.sharding else 2
    return Plan(
        parameters=parameters,
        softmax_parameters=model_parameters(softmax),
        forward_flops_per_token=forward,
        training_flops_per_token=passes * forward,
        mixer_share=sum(flops for part, flops in parts.items() if part.startswith("mixer"))
        / sum(parts.values()),
        held_bytes=held,
        step_bytes=in_step,
        memory_bytes=gpu.memory * GIB,
        tokens=training.steps * training.batch_tokens,
        steps=training.steps,
        micro_batch=training.micro_batch,
        accumulation=accumulation,
        arithmetic_seconds=passes * forward * training.batch_tokens / (gpu.flops * count * utilisation),
        communication_seconds=sent / (gpu.network if nodes > 1 else gpu.link),
        decode_bytes_per_token=model_state_bytes(config, context, torch.bfloat16) // context,
        softmax_decode_bytes_per_token=model_state_bytes(softmax, context, torch.bfloat16) // context,
    )


def even(recipe: Recipe, count: int) -> Recipe:
    """With the largest micro-batch, up to the recipe's, of which all GPUs can take equally many; if there is none, as it is."""
    fitting = (
        size
        for size in range(recipe.training.micro_batch, 0, -1)
        if recipe.sequences_per_step % (size * count) == 0
    )
    size = next(fitting, recipe.training.micro_batch)
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, micro_batch=size))


def find(place: str, changes: list[str]) -> Recipe:
    """A recipe; or a model, whose training is that of TEMPLATE as far as ``changes`` do not say otherwise."""
    if not Path(place).is_dir() and Path(place).suffix != ".json":
        return load_recipe(place, changes)
    config = our_config(place)
    known = {
        field.name for field in dataclasses.fields(HyperMLPConfig)
    } & HyperMLPConfig.__annotations__.keys()
    name = Path(place).resolve()
    own = [
        f"name={json.dumps(name.parent.name if name.is_file() else name.name)}",
        f"data.context={config.max_position_embeddings}",
    ]
    recipe = load_recipe(TEMPLATE, [*own, *changes])
    return dataclasses.replace(recipe, model={key: getattr(config, key) for key in known})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        help=f"a recipe; or a folder with a model, or its config.json, to be trained as {TEMPLATE} is",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS), help="default: h100")
    parser.add_argument("--count", type=int, default=1, help="how many in all (default: 1)")
    parser.add_argument("--nodes", type=int, help="in how many machines (default: eight GPUs in each)")
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.3,
        help="share of the GPU's peak that is reached (default: 0.3, a guess)",
    )
    parser.add_argument("--vocab", type=int, help="the tokenizer's size, where its name does not tell")
    parser.add_argument("--json", choices=("-",), help="print the numbers instead")


def main(args: argparse.Namespace) -> None:
    if args.count < 1 or not 0 < args.utilisation <= 1:
        raise UserError(
            f"--count is {args.count}, --utilisation {args.utilisation}; at least 1, and above 0 and at most 1"
        )
    nodes = usual_nodes(args.count) if args.nodes is None else args.nodes
    if nodes < 1 or args.count % nodes:
        raise UserError(f"--nodes is {nodes}; it must be a divisor of --count = {args.count}")
    recipe = find(args.recipe, args.set)
    gpu = GPUS[args.gpu]
    plan = make_plan(
        recipe,
        vocab_size=recipe.vocab_size(args.vocab),
        gpu=gpu,
        count=args.count,
        nodes=nodes,
        utilisation=args.utilisation,
    )
    if args.json:
        found = dataclasses.asdict(plan) | {
            "step_seconds": plan.step_seconds,
            "seconds": plan.seconds,
            "fits": plan.fits,
        }
        print(json.dumps(found | {"limit": plan.limit}, indent=2))
        return
    where = f"{args.count} x {args.gpu} in {nodes} {'node' if nodes == 1 else 'nodes'}"
    print(f"{recipe.name} on {where}\n\n{page(plan, recipe, args.count, gpu, args.utilisation)}")


def usual_nodes(count: int) -> int:
    """As few as hold eight GPUs at most, equally many in each."""
    return next(nodes for nodes in range(-(-count // 8), count + 1) if count % nodes == 0)


def page(plan: Plan, recipe: Recipe, count: int, gpu: Gpu, utilisation: float) -> str:
    """Markdown."""
    more = plan.parameters / plan.softmax_parameters - 1
    training = recipe.training
    divided = f"its part of {plan.held_bytes * count / GIB:.1f} GiB" if training.sharding else "a copy"
    both = plan.held_bytes + plan.step_bytes
    gpus = "GPU" if count == 1 else "GPUs"
    instead = (
        f"; {training.micro_batch}, as in the recipe, do not come out even"
        if plan.micro_batch != training.micro_batch
        else ""
    )
    batches = "micro-batch" if plan.accumulation == 1 else "micro-batches"
    decode, softmax = plan.decode_bytes_per_token, plan.softmax_decode_bytes_per_token
    rows = {
        "parameters": f"{plan.parameters:,} ({more:+.2%} against softmax attention)",
        "forward, FLOPs per token": f"{plan.forward_flops_per_token / 1e9:.4g} G, {plan.mixer_share:.0%} of it in the mixers",
        "training, FLOPs per token": f"{plan.training_flops_per_token / 1e9:.4g} G"
        + (", recomputing included" if training.gradient_checkpointing else ""),
        "weights and optimizer": f"{plan.held_bytes / GIB:.3g} GiB on each GPU: {divided}",
        "gradients, activations, buffers": f"{plan.step_bytes / GIB:.3g} GiB at most, with a micro-batch of {plan.micro_batch}",
        "memory": f"{both / GIB:.3g} of {plan.memory_bytes / GIB:.0f} GiB on each GPU: {'fits' if plan.fits else 'does not fit'}",
        "tokens": f"{plan.tokens / 1e9:.4g} B in {plan.steps:,} steps of {training.batch_tokens:,}",
        "a step": f"{count} {gpus} x {plan.accumulation} {batches} x {plan.micro_batch} sequences of {recipe.data.context}{instead}",
        "arithmetic of a step": f"{seconds(plan.arithmetic_seconds)} at {utilisation:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s",
        "communication of a step": f"{seconds(plan.communication_seconds)}, beside it"
        if count > 1
        else "none",
        "time": duration(plan.seconds),
        "limited by": plan.limit,
        "decoding state": f"{decode / 1024:.4g} KiB for each token of context in bfloat16; softmax attention {softmax / 1024:.4g} KiB",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.2g} ms"


def duration(value: float) -> str:
    if value < 3600:
        return f"{value / 60:.2g} minutes"
    return f"{value / 3600:.1f} hours" if value < 2 * 86400 else f"{value / 86400:.1f} days"
