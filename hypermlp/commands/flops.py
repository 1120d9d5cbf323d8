"""``hypermlp flops``: parameters and FLOPs of a recipe's or a checkpoint's model, part by part."""

import argparse
import json
from pathlib import Path
from typing import Any

from hypermlp.costs.model import model_flops_table, model_parameter_table, model_state_bytes, with_softmax
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig
from hypermlp.train.recipe import load_recipe
from hypermlp.train.sample import our_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a recipe, a folder with a model, or its config.json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument("--length", type=int, help="of the sequence (default: the model's context)")
    parser.add_argument("--vocab", type=int, help="the tokenizer's size, where its name does not tell")
    parser.add_argument("--json", choices=("-",), help="print the numbers instead")


def main(args: argparse.Namespace) -> None:
    config = find_config(args.model, args.set, args.vocab)
    length = config.max_position_embeddings if args.length is None else args.length
    if not 1 <= length <= config.max_position_embeddings:
        raise UserError(
            f"--length is {length}; it must be 1 to {config.max_position_embeddings}, the model's context"
        )
    found = costs(config, length)
    print(json.dumps(found, indent=2) if args.json else page(found))


def find_config(model: str, changes: list[str], vocab: int | None) -> HyperMLPConfig:
    if Path(model).is_dir() or Path(model).suffix == ".json":
        if changes:
            raise UserError("--set changes a recipe; a folder's model is what it is")
        return our_config(model)
    recipe = load_recipe(model, changes)
    return recipe.model_config(recipe.vocab_size(vocab))


def costs(config: HyperMLPConfig, length: int) -> dict[str, Any]:
    """FLOPs per token are the mean over a sequence of this length."""
    flops = {part: count / length for part, count in model_flops_table(config, length).items()}
    softmax = with_softmax(config)
    return {
        "mixer": config.mixer,
        "length": length,
        "parameters": model_parameter_table(config),
        "forward_flops_per_token": flops,
        "training_flops_per_token": 3 * sum(flops.values()),
        "softmax_parameters": sum(model_parameter_table(softmax).values()),
        "softmax_forward_flops_per_token": sum(model_flops_table(softmax, length).values()) / length,
        "state_bytes": model_state_bytes(config, length),
        "softmax_state_bytes": model_state_bytes(softmax, length),
    }


def page(found: dict[str, Any]) -> str:
    """Markdown."""
    parameters, flops = found["parameters"], found["forward_flops_per_token"]
    total, softmax = sum(flops.values()), found["softmax_forward_flops_per_token"]
    lines = ["| part | parameters | forward, MFLOPs/token | share |", "| --- | ---: | ---: | ---: |"]
    for part in dict.fromkeys((*parameters, *flops)):
        count, cost = parameters.get(part), flops.get(part)
        if count or cost:
            cost_cells = f"{cost / 1e6:.4g} | {cost / total:.1%}" if cost else " | "
            lines.append(f"| {part} | {f'{count:,}' if count else ''} | {cost_cells} |")
    lines.append(f"| all | {sum(parameters.values()):,} | {total / 1e6:.4g} | |")
    lines.append(
        f"| the same with softmax attention | {found['softmax_parameters']:,} | {softmax / 1e6:.4g} | |"
    )
    state, other = found["state_bytes"], found["softmax_state_bytes"]
    lines += [
        "",
        f"Training: {found['training_flops_per_token'] / 1e6:.4g} MFLOPs/token. All are means over a sequence of {found['length']},",
        "pairs that see each other only. Decoding state after it, in float32: "
        f"{state / 1024:,.0f} KiB; softmax attention {other / 1024:,.0f} KiB.",
    ]
    return "\n".join(lines)
