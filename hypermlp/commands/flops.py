"""``hypermlp flops``: parameters and FLOPs of a model, part by part."""

import json

from hypermlp.commands.shared import PRINT_JSON, SET, VOCAB, Args, Argument, command
from hypermlp.costs.model import cost_summary, cost_table
from hypermlp.costs.plan import recipe_of
from hypermlp.errors import UserError


@command(
    Argument("model", help="a recipe, a folder with a model, or its config.json"),
    SET,
    Argument("--length", type=int, help="tokens in the sequence (default: the model's context)"),
    VOCAB,
    PRINT_JSON,
)
def main(args: Args) -> None:
    recipe = recipe_of(args.model, args.set)
    config = recipe.model_config(recipe.vocab_size(args.vocab))
    context = config.max_position_embeddings
    length = context if args.length is None else args.length
    if not 1 <= length <= context:
        raise UserError(f"--length is {length}; it must be 1 to {context}, the model's context")
    summary = cost_summary(config, length)
    if args.json:
        print(json.dumps(summary, indent=2))
        return
    state, softmax = (summary[name] / 1024 for name in ("state_bytes", "softmax_state_bytes"))
    print(
        f"{cost_table(summary).markdown()}\n\n"
        f"Training: {summary['training_flops_per_token'] / 1e6:.4g} MFLOPs/token. "
        f"FLOPs are means over a sequence of {length} tokens,\nand count only pairs that see each other.\n"
        f"Decoding state after the sequence, in float32: {state:,.0f} KiB; "
        f"softmax attention {softmax:,.0f} KiB."
    )
