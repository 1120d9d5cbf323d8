"""``hypermlp sample``: text from a saved model, token by token as it comes."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, TextStreamer

from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.train import checkpoints

USUAL = 200  # tokens


def model_folder(name: str) -> Path:
    """A folder with a model in it, or a run: its final model, or else its newest complete checkpoint."""
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(
            f"{name} is no folder; allowed: a folder of save_pretrained, a checkpoint, or a run of `hypermlp train`"
        )
    for candidate in (
        folder,
        folder / "final",
        checkpoints.newest_complete(folder) if folder.is_dir() else None,
    ):
        if candidate is not None and (candidate / "config.json").is_file():
            return candidate
    raise UserError(
        f"{name} has no model; allowed: a folder of save_pretrained, a checkpoint, or a run of `hypermlp train`"
    )


def our_config(name: str) -> HyperMLPConfig:
    """Of a folder with a model, or of its config.json."""
    path = Path(name) if Path(name).is_file() else model_folder(name) / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is no model's configuration: {error}") from error
    if kind != HyperMLPConfig.model_type:
        raise UserError(f"{path} is of a model of type {kind!r}; allowed: {HyperMLPConfig.model_type!r}")
    return HyperMLPConfig.from_pretrained(path)


def require_whole(name: str, model: Any, info: dict[str, Any]) -> None:
    """transformers fills up what a checkpoint lacks with random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{name} lacks {', '.join(missing[:3])}{f' and {len(missing) - 3} more' * (len(missing) > 3)}: it is not whole"
        )
    broken = [key for key, value in model.named_parameters() if not torch.isfinite(value).all()]
    if broken:
        raise UserError(
            f"{name} has numbers that are not finite, first in {broken[0]}; is it damaged, or did its training diverge?"
        )


def load(name: str) -> tuple[HyperMLPForCausalLM, Any]:
    """Model and tokenizer of a folder."""
    folder = model_folder(name)
    loaded: Any = HyperMLPForCausalLM.from_pretrained(
        folder, config=our_config(name), output_loading_info=True
    )
    model: HyperMLPForCausalLM = loaded[0].eval()
    require_whole(name, model, loaded[1])
    if not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder} has no tokenizer; save one there with tokenizer.save_pretrained")
    return model, AutoTokenizer.from_pretrained(folder)


def write(model: Any, tokenizer: Any, prompt: str, tokens: int | None, **settings: Any) -> tuple[str, float]:
    """Continue ``prompt``, printing as it goes; the text, and tokens per second."""
    inputs = tokenizer(prompt or tokenizer.bos_token, return_tensors="pt", add_special_tokens=False).to(
        model.device
    )
    context, given = model.config.max_position_embeddings, inputs["input_ids"].shape[1]
    if given + (tokens or 1) > context:
        raise UserError(
            f"{given} tokens of prompt and {tokens or 1} new ones; the model's context has {context}"
        )
    settings["max_new_tokens"] = tokens or min(USUAL, context - given)
    streamer = TextStreamer(tokenizer, skip_prompt=not prompt, skip_special_tokens=True)
    began = time.perf_counter()
    out = model.generate(**inputs, streamer=streamer, pad_token_id=tokenizer.pad_token_id, **settings)
    count = out.shape[1] - inputs["input_ids"].shape[1]
    return tokenizer.decode(out[0], skip_special_tokens=True), count / (time.perf_counter() - began)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a folder with a model, or a run of `hypermlp train`")
    parser.add_argument(
        "prompt",
        nargs="?",
        help="what to go on from; - for standard input; nothing for the beginning of a document",
    )
    parser.add_argument(
        "--tokens", type=int, help=f"how many to write (default: {USUAL}, or what the context has room for)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 for the likeliest token each time (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=50, help="choose among so many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same (default: 0)")


def main(args: argparse.Namespace) -> None:
    if (args.tokens is not None and args.tokens < 1) or args.temperature < 0 or args.top_k < 1:
        raise UserError("--tokens and --top-k must be at least 1, --temperature 0 or more")
    transformers.set_seed(args.seed)
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(args.checkpoint)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt or ""
    drawn: dict[str, Any] = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k}
    with torch.inference_mode():
        _, speed = write(
            model, tokenizer, prompt, args.tokens, **(drawn if args.temperature > 0 else {"do_sample": False})
        )
    print(f"{speed:.0f} tokens/s", file=sys.stderr)
