"""The paper's efficiency table: FLOPs, time and memory of every mixer in the same GPT-2 body."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hypermlp.bench.measure import Row, Work, forward_pass, interleaved_medians, peak_bytes, random_tokens
from hypermlp.costs.mixer import forward_flops
from hypermlp.costs.profiler import body_count, mixer_count
from hypermlp.models import HyperMLPConfig, HyperMLPModel
from hypermlp.paper.efficiency import MFLOPS_PER_TOKEN, SETTING
from hypermlp.reporting.table import Columns, Table

VOCAB_SIZE = 256  # the embeddings are not counted


def _published(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.2f}"


def _mebibytes(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / 2**20:,.0f}"


COUNTED: Columns = [
    ("mixer", "{mixer}"),
    ("forward, MFLOPs/token", "{true_fwd_mflops_per_token:.2f}"),
    ("profiler's", "{fwd_mflops_per_token:.2f}"),
    ("the paper's", _published("paper_fwd_mflops_per_token")),
    ("training, profiler's", "{train_mflops_per_token:.2f}"),
    ("the paper's", _published("paper_train_mflops_per_token")),
    ("forward in all, TFLOPs", "{true_fwd_tflops:.3f}"),
    ("profiler's", "{fwd_tflops:.3f}"),
    ("training in all", "{true_train_tflops:.3f}"),
    ("profiler's", "{train_tflops:.3f}"),
]
PASSES = (("forward", "fwd"), ("training", "train"))  # title, prefix of the keys
TIMED: Columns = [
    *((f"{title}, s", f"{{{prefix}_seconds:.3f}}") for title, prefix in PASSES),
    *((f"{title}, tokens/s", f"{{{prefix}_tokens_per_second:,.0f}}") for title, prefix in PASSES),
    *((f"{title}, MiB", _mebibytes(f"{prefix}_peak_bytes")) for title, prefix in PASSES),
]


def table(rows: list[Row]) -> Table:
    """Return the table; without times and memory unless every row has them."""
    return Table.of(rows, [*COUNTED, *TIMED] if all("fwd_seconds" in row for row in rows) else COUNTED)


def body_config(mixer: str, *, hidden: int, layers: int, length: int) -> HyperMLPConfig:
    """Return the configuration of the GPT-2 body with this mixer."""
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCAB_SIZE}
    return HyperMLPConfig(mixer=mixer, max_position_embeddings=length, learned_positions=True, **sizes)


def count(mixer: str, config: HyperMLPConfig, batch: int) -> Row:
    """Return the FLOPs of the body, without embeddings and head, per token and per batch.

    Keys with ``true`` count only pairs of positions that see each other; the others are what the profiler
    counts. The paper's values are None where the setting is not the paper's.
    """
    hidden, layers, length = config.hidden_size, config.num_hidden_layers, config.max_position_embeddings
    layer, tokens = config.mixer_config(0), batch * length
    forward, train = body_count(mixer_count(layer, length), hidden, layers)
    true = layers * (forward_flops(layer, length) / length + 2 * 8 * hidden**2)
    published = MFLOPS_PER_TOKEN if (hidden, layers, length) == tuple(SETTING.values()) else {}
    paper_forward, paper_train = published.get(mixer, (None, None))
    return {
        "mixer": mixer,
        "fwd_mflops_per_token": forward / 1e6,
        "train_mflops_per_token": train / 1e6,
        "true_fwd_mflops_per_token": true / 1e6,
        "true_train_mflops_per_token": 3 * true / 1e6,
        "fwd_tflops": forward * tokens / 1e12,
        "train_tflops": train * tokens / 1e12,
        "true_fwd_tflops": true * tokens / 1e12,
        "true_train_tflops": 3 * true * tokens / 1e12,
        "paper_fwd_mflops_per_token": paper_forward,
        "paper_train_mflops_per_token": paper_train,
    }


def measure(
    configs: Mapping[str, HyperMLPConfig],
    *,
    length: int,
    batch: int,
    device: str,
    rounds: int,
    seconds: float,
) -> dict[str, Row]:
    """Return times and memory of each mixer. Each kind of pass is timed interleaved over all mixers."""
    tokens = random_tokens(VOCAB_SIZE, batch, length).to(device)
    models = {mixer: _body(config, device) for mixer, config in configs.items()}
    rows: dict[str, Row] = {mixer: {} for mixer in configs}
    for kind, work_of in (("fwd", forward_pass), ("train", _training_pass)):
        works = {mixer: work_of(model, tokens) for mixer, model in models.items()}
        times = interleaved_medians(works, rounds=rounds, seconds=seconds, device=device)
        for mixer, time in times.items():
            rows[mixer] |= {
                f"{kind}_seconds": time,
                f"{kind}_tokens_per_second": tokens.numel() / time,
                f"{kind}_peak_bytes": peak_bytes(works[mixer], device),
            }
    return rows


def _body(config: HyperMLPConfig, device: str) -> Any:
    model: Any = HyperMLPModel(config)
    return torch.compile(model.to(device, torch.bfloat16)) if device == "cuda" else model


def _training_pass(model: Any, tokens: Tensor) -> Work:
    """Return forward and backward; the loss is the sum of the output, and the gradients are dropped."""

    def work() -> None:
        model(tokens, use_cache=False).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    return work
