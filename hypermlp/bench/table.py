"""``hypermlp bench table``: the paper's efficiency table, for every mixer in the same GPT-2 body."""

import argparse
import json
from typing import Any

import torch

from hypermlp.bench.columns import Column, table
from hypermlp.bench.measure import WARMUPS, Work, interleaved_medians, peak_bytes
from hypermlp.bench.profiler import body_count, mixer_count
from hypermlp.costs.mixer import forward_flops
from hypermlp.errors import UserError
from hypermlp.layers.registry import chosen_mixers
from hypermlp.models import HyperMLPConfig, HyperMLPModel
from hypermlp.reporting.records import check_writable, new_record, write_record

SETTING = {"hidden": 768, "layers": 12, "length": 1024}
PAPER = {  # MFLOPs per token in its table, forward and training, by the profiler
    "G-cg-q-12o": (183.27, 549.76),
    "softmax": (169.89, 509.65),
    "softmax-naive": (207.84, 623.41),
    "linear": (169.94, 509.75),
    "gla": (208.03, 623.90),
    "hgrn2": (169.89, 509.65),
    "gsa": (184.04, 552.11),
    "mamba": (156.33, 468.97),
    "rwkv7": (179.35, 538.09),
    "path": (171.29, 513.84),
}


COUNTED = [
    Column("mixer", lambda row: row["mixer"]),
    Column("forward, MFLOPs/token", lambda row: f"{row['true_fwd_mflops_per_token']:.2f}"),
    Column("profiler's", lambda row: f"{row['fwd_mflops_per_token']:.2f}"),
    Column(
        "the paper's",
        lambda row: f"{row['paper_fwd_mflops_per_token']:.2f}" if row["paper_fwd_mflops_per_token"] else "",
    ),
    Column("training, profiler's", lambda row: f"{row['train_mflops_per_token']:.2f}"),
    Column(
        "the paper's",
        lambda row: (
            f"{row['paper_train_mflops_per_token']:.2f}" if row["paper_train_mflops_per_token"] else ""
        ),
    ),
    Column("forward in all, TFLOPs", lambda row: f"{row['true_fwd_tflops']:.3f}"),
    Column("profiler's", lambda row: f"{row['fwd_tflops']:.3f}"),
    Column("training in all", lambda row: f"{row['true_train_tflops']:.3f}"),
    Column("profiler's", lambda row: f"{row['train_tflops']:.3f}"),
]
TIMED = [
    Column("forward, s", lambda row: f"{row['fwd_seconds']:.3f}"),
    Column("training, s", lambda row: f"{row['train_seconds']:.3f}"),
    Column("forward, tokens/s", lambda row: f"{row['fwd_tokens_per_second']:,.0f}"),
    Column("training, tokens/s", lambda row: f"{row['train_tokens_per_second']:,.0f}"),
    Column("forward, MiB", lambda row: f"{row['fwd_peak_bytes'] / 2**20:,.0f}"),
    Column("training, MiB", lambda row: f"{row['train_peak_bytes'] / 2**20:,.0f}"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--mixer", nargs="+", default=["all"], metavar="NAME", help="labels and peers (default: all)"
    )
    parser.add_argument("--count-only", action="store_true", help="no clock: FLOPs alone")
    for name, value in SETTING.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default, as in the paper: {value}")
    parser.add_argument("--batch", type=int, help="default: 8 as in the paper, but 1 where a CPU is timed")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=device,
        help=f"default here: {device}; cuda compiles, in bfloat16",
    )
    parser.add_argument("--rounds", type=int, default=20, help="most timed passes of each kind (default: 20)")
    parser.add_argument(
        "--seconds", type=float, default=300, help="stop each kind after so many seconds (default: 300)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write a record; with --count-only, - prints the rows alone"
    )


def main(args: argparse.Namespace) -> None:
    if args.json == "-" and not args.count_only:
        raise UserError("--json - goes with --count-only; give a file for the record of timed rows")
    if args.json and args.json != "-":
        check_writable(args.json)
    if args.rounds < 3 or not args.seconds > 0:
        raise UserError(f"--rounds is {args.rounds}, --seconds {args.seconds}; at least 3, and positive")
    if args.batch is None:
        args.batch = 8 if args.device == "cuda" or args.count_only else 1
    for name in (*SETTING, "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; at least 1")
    if args.device == "cuda" and not torch.cuda.is_available() and not args.count_only:
        raise UserError("--device is cuda, and there is no GPU here; allowed: cpu, or --count-only")
    configs = {mixer: _config(mixer, args) for mixer in chosen_mixers(args.mixer)}
    rows = [count(mixer, config, args.batch) for mixer, config in configs.items()]
    if args.json == "-":
        print(json.dumps(rows, indent=2))
        return
    columns = COUNTED
    if not args.count_only:
        passes = (args.rounds + WARMUPS) * len(configs)
        print(
            f"counted; now at most {passes} passes of each kind on {args.device}, {args.seconds:.0f} s beyond the first three",
            flush=True,
        )
        measure(rows, configs, args)
        columns = COUNTED + TIMED
    print(table(rows, columns))
    if args.json:
        settings = {
            name: getattr(args, name)
            for name in (*SETTING, "batch", "device", "rounds", "seconds", "count_only")
        }
        write_record(args.json, new_record("bench-table", settings, rows))
        print(f"record: {args.json}")


def _config(mixer: str, args: argparse.Namespace) -> HyperMLPConfig:
    return HyperMLPConfig(
        mixer=mixer,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        max_position_embeddings=args.length,
        vocab_size=256,
        learned_positions=True,
    )


def count(mixer: str, config: HyperMLPConfig, batch: int) -> dict[str, Any]:
    """Of the body without embeddings and head, as the paper counts: of a token, and of a batch. ``true``: pairs that see each other."""
    hidden, layers, length = config.hidden_size, config.num_hidden_layers, config.max_position_embeddings
    layer = config.mixer_config(0)
    counted = body_count(mixer_count(layer, length), hidden, layers)
    true = layers * (forward_flops(layer, length) / length + 2 * 8 * hidden**2)
    tokens = batch * length
    in_paper = PAPER.get(mixer) if {"hidden": hidden, "layers": layers, "length": length} == SETTING else None
    return {
        "mixer": mixer,
        "fwd_mflops_per_token": counted.forward / 1e6,
        "train_mflops_per_token": counted.train / 1e6,
        "true_fwd_mflops_per_token": true / 1e6,
        "true_train_mflops_per_token": 3 * true / 1e6,
        "fwd_tflops": counted.forward * tokens / 1e12,
        "train_tflops": counted.train * tokens / 1e12,
        "true_fwd_tflops": true * tokens / 1e12,
        "true_train_tflops": 3 * true * tokens / 1e12,
        "paper_fwd_mflops_per_token": in_paper[0] if in_paper else None,
        "paper_train_mflops_per_token": in_paper[1] if in_paper else None,
    }


def measure(rows: list[dict[str, Any]], configs: dict[str, HyperMLPConfig], args: argparse.Namespace) -> None:
    """Adds to each row its times and memory; each kind is taken in turn over all mixers."""
    tokens = torch.randint(256, (args.batch, args.length), generator=torch.Generator().manual_seed(0)).to(
        args.device
    )
    models = {mixer: _body(config, args.device) for mixer, config in configs.items()}
    works = [{mixer: kind(model, tokens) for mixer, model in models.items()} for kind in (_forward, _train)]
    how = {"rounds": args.rounds, "seconds": args.seconds, "device": args.device}
    forward, train = (interleaved_medians(each, **how) for each in works)
    for row in rows:
        mixer = row["mixer"]
        row |= {
            "fwd_seconds": forward[mixer],
            "train_seconds": train[mixer],
            "fwd_tokens_per_second": tokens.numel() / forward[mixer],
            "train_tokens_per_second": tokens.numel() / train[mixer],
            "fwd_peak_bytes": peak_bytes(works[0][mixer], args.device),
            "train_peak_bytes": peak_bytes(works[1][mixer], args.device),
        }


def _body(config: HyperMLPConfig, device: str) -> Any:
    model: Any = HyperMLPModel(config)
    model = model.to(device)
    return torch.compile(model.bfloat16()) if device == "cuda" else model


def _forward(model: Any, tokens: torch.Tensor) -> Work:
    @torch.no_grad()
    def work() -> None:
        model(tokens, use_cache=False)

    return work


def _train(model: Any, tokens: torch.Tensor) -> Work:
    """Forward, the sum of the output as loss, backward; no optimizer, and no gradients are kept."""

    def work() -> None:
        model(tokens, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    return work
