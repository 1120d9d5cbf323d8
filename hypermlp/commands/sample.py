"""``hypermlp sample``: generate text with a saved model and print it token by token."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from hypermlp.commands.shared import CHECKPOINT, Args, Argument, command, read_prompt
from hypermlp.errors import UserError, first_line
from hypermlp.models.loading import is_local, load, model_folder

USUAL = 200  # tokens
TEMPERATURES = (0.01, 100.0)  # of random draws: below, the softmax overflows; above, every token is as likely
SEEDS = 2**32  # of NumPy


@command(
    CHECKPOINT,
    Argument(
        "prompt",
        nargs="?",
        default="",
        help="the text to continue; - reads it from standard input; without it a new document begins",
    ),
    Argument(
        "--tokens", least=1, help=f"number of new tokens (default: {USUAL}, or as many as fit the context)"
    ),
    Argument("--temperature", type=float, default=0.8, help="0 takes the most likely token each time"),
    Argument("--top-k", least=1, default=50, help="draw from this many most likely tokens"),
    Argument("--seed", type=int, default=0, help="seed of the random draws"),
)
def main(args: Args) -> None:
    low, high = TEMPERATURES
    if args.temperature != 0 and not low <= args.temperature <= high:
        raise UserError(
            f"--temperature is {args.temperature}; it must be 0 (always the most likely token), or between "
            f"{low} and {high}"
        )
    if not 0 <= args.seed < SEEDS:
        raise UserError(f"--seed is {args.seed}; it must be at least 0 and below {SEEDS}")
    prompt = read_prompt(args.prompt)
    if prompt.startswith("@") and Path(prompt[1:]).is_file():  # a decorator is a prompt too
        print(f"the prompt is the text {prompt!r}; to read the file: - < {prompt[1:]}", file=sys.stderr)
    transformers.set_seed(args.seed)
    transformers.logging.disable_progress_bar()
    folder = model_folder(args.checkpoint) if is_local(args.checkpoint) else Path(args.checkpoint)
    if folder.name.startswith("checkpoint-") and folder != Path(args.checkpoint):
        print(f"the run has not ended; this is its {folder.name}", file=sys.stderr)
    model, tokenizer = load(args.checkpoint)
    drawn = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k}
    settings = drawn if args.temperature > 0 else {"do_sample": False}
    speed = stream(model, tokenizer, prompt, args.tokens, settings)
    print(f"{speed:.0f} tokens/s", file=sys.stderr)


@torch.inference_mode()
def stream(model: Any, tokenizer: Any, prompt: str, tokens: int | None, settings: dict[str, Any]) -> float:
    """Print ``prompt`` and its continuation as it is generated; return the number of new tokens per second.

    ``tokens`` is the number of new tokens, None for the default; ``settings`` go to ``generate``.
    """
    # The check of the length is below, with a message of our own (verbose=False).
    text = prompt or tokenizer.bos_token
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)
    context, length = model.config.max_position_embeddings, inputs["input_ids"].shape[1]
    if not model.is_endless and length + (tokens or 1) > context:
        raise UserError(
            f"{length} tokens of prompt and {tokens or 1} new ones are too many; "
            f"the model's context has {context}. To go on, extend the context with "
            "`hypermlp extend`, or train a model with model.sliding_window (docs/long-context.md)"
        )
    room = USUAL if model.is_endless else min(USUAL, context - length)
    try:
        model(inputs["input_ids"][:, :1].to(model.device))  # may build the kernels, before the clock starts
        began = time.perf_counter()
        out = model.generate(
            **inputs.to(model.device),
            streamer=transformers.TextStreamer(tokenizer, skip_prompt=not prompt, skip_special_tokens=True),
            max_new_tokens=tokens or room,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    except UserError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:  # settings that the model was saved with
        file = Path(model.config.name_or_path) / "generation_config.json"
        raise UserError(f"{file} cannot be used: {first_line(error)}; correct or remove it") from error
    return (out.shape[1] - length) / (time.perf_counter() - began)
