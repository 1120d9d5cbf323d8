"""``hypermlp extend``: save a copy of a model with another context."""

from pathlib import Path

import transformers

from hypermlp.commands.shared import CHECKPOINT, Args, Argument, command
from hypermlp.config import ROPE_TYPES
from hypermlp.errors import UserError
from hypermlp.layers.resizing import DEFAULT_METHOD, METHODS
from hypermlp.models.loading import load


@command(
    CHECKPOINT,
    Argument("--context", least=1, required=True, help="positions of the new context; may be fewer"),
    Argument("--out", metavar="FOLDER", required=True, help="folder of the new model; it must not exist yet"),
    Argument(
        "--method",
        choices=METHODS,
        default=DEFAULT_METHOD,
        help="parameters of the added slots: zeros, the mean of the last 32, the far half repeated, or the "
        "far half stretched over log-lag",
    ),
    Argument(
        "--rope-type",
        choices=ROPE_TYPES[1:],
        help="also scale the rotary frequencies of labels with the letter p (default: leave them)",
    ),
)
def main(args: Args) -> None:
    out = Path(args.out)
    if out.exists():
        raise UserError(f"--out is {out}, which exists already; name a new folder")
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(args.checkpoint)
    before = model.config.max_position_embeddings
    model.extend_context(args.context, method=args.method, rope_type=args.rope_type)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    same = f"up to {min(before, args.context)} positions, the model computes what it did"
    if args.rope_type:
        same = f"its rotary frequencies are scaled ({args.rope_type}, factor {model.config.rope_factor:g})"
    print(f"saved in {out}: the context had {before} positions and has {args.context}; {same}")
