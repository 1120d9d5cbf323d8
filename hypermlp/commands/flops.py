"""``hypermlp flops``: parameters and FLOPs of a model, part by part."""

import argparse
import json

from hypermlp.costs.model import cost_summary, cost_table
from hypermlp.costs.plan import recipe_of
from hypermlp.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a recipe, a folder with a model, or its config.json")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe"
    )
    parser.add_argument("--length", type=int, help="tokens in the sequence (default: the model's context)")
    parser.add_argument("--vocab", type=int, help="size of the tokenizer, if its name does not determine it")
    parser.add_argument("--json", choices=("-",), help="print the numbers as JSON")


def main(args: argparse.Namespace) -> None:
    recipe = recipe_of(args.model, args.set)
    config = recipe.model_config(recipe.vocab_size(args.vocab))
    context = config.max_position_embeddings
    length = context if args.length is None else args.length
    if not 1 <= length <= context:
        raise UserError(f"--length is {length}; it must be 1 to {context}, the model's context")
    found = cost_summary(config, length)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    state, softmax = (found[name] / 1024 for name in ("state_bytes", "softmax_state_bytes"))
    print(
        f"{cost_table(found).markdown()}\n\n"
        f"Training: {found['training_flops_per_token'] / 1e6:.4g} MFLOPs/token. "
        f"FLOPs are means over a sequence of {length} tokens,\nand count only pairs that see each other.\n"
        f"Decoding state after the sequence, in float32: {state:,.0f} KiB; "
        f"softmax attention {softmax:,.0f} KiB."
    )
