"""Costs of sliding windows: decoding after one window and after ten, training at four and at eight."""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hypermlp.bench.measure import Row, Work, interleaved_times, quartiles, random_tokens, with_quartiles
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM
from hypermlp.reporting.table import Columns, Table

AT_MOST = {"state": 2.5, "decode": 1.2, "train": 2.5}
DECODED = 32  # tokens in one timing
VOCABULARY = 257
COLUMNS: Columns = [
    ("mixer", "{mixer}"),
    ("window", "{window}"),
    ("state after 1 window, KiB", lambda row: f"{row['state_bytes'][0] / 2**10:,.0f}"),
    ("after 10, KiB", lambda row: f"{row['state_bytes'][1] / 2**10:,.0f}"),
    ("state ratio (goal 2.5)", "{state_ratio:.2f}"),
    ("decode after 1 window, ms/token", "{decode_ms[0]:.2f}"),
    ("after 10", "{decode_ms[1]:.2f}"),
    ("decoding ratio (goal 1.2)", lambda row: with_quartiles(row["decode_ratio"], row["decode_quartiles"])),
    ("training step at T = 4w, ms", "{train_ms[0]:.0f}"),
    ("at 8w", "{train_ms[1]:.0f}"),
    ("training ratio (goal 2.5)", lambda row: with_quartiles(row["train_ratio"], row["train_quartiles"])),
    ("reached", lambda row: "yes" if row["reached"] else "no"),
]


def table(rows: list[Row]) -> Table:
    """Return the table of rows that ``measure`` returned."""
    return Table.of(rows, COLUMNS)


def measure(mixer: str, *, window: int, hidden: int, layers: int, rounds: int, seconds: float) -> Row:
    """Return the costs of a model whose layers all have a sliding window.

    Memory is that of all tensors of the decoding state. Times are medians of interleaved rounds; a ratio is
    the median of the ratios of the rounds.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    config = HyperMLPConfig(mixer=mixer, max_position_embeddings=window, sliding_window=window, **sizes)
    model = HyperMLPForCausalLM(config).eval()
    caches = [_decoded(model, count * window) for count in (1, 10)]
    state = [_bytes(cache) for cache in caches]
    decode = _timed(
        {str(i): partial(_decode, model, cache) for i, cache in enumerate(caches)}, rounds, seconds
    )
    trained = {str(count): _training_step(model, count * window) for count in (4, 8)}
    train = _timed(trained, rounds, seconds)
    row: Row = {
        "mixer": mixer,
        "window": window,
        "hidden": hidden,
        "layers": layers,
        "state_bytes": state,
        "state_ratio": state[1] / state[0],
        "decode_ms": [1000 * median(times) / DECODED for times in decode],
        "train_ms": [1000 * median(times) for times in train],
    }
    for name, (first, second) in {"decode": decode, "train": train}.items():
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        row |= {f"{name}_ratio": median(ratios), f"{name}_quartiles": quartiles(ratios)}
    return row | {"reached": all(row[f"{name}_ratio"] <= most for name, most in AT_MOST.items())}


def _timed(works: dict[str, Work], rounds: int, seconds: float) -> list[list[float]]:
    return list(interleaved_times(works, rounds=rounds, seconds=seconds).values())


@torch.inference_mode()
def _decoded(model: HyperMLPForCausalLM, count: int) -> DynamicCache:
    """Return a cache after ``count`` tokens, one at a time."""
    cache = DynamicCache(config=model.config)
    for token in random_tokens(VOCABULARY, count, 1, 1):
        model(token, past_key_values=cache)
    return cache


@torch.inference_mode()
def _decode(model: HyperMLPForCausalLM, cache: DynamicCache) -> None:
    """Decode a few tokens, and remove them from the cache again."""
    for token in random_tokens(VOCABULARY, DECODED, 1, 1):
        model(token, past_key_values=cache)
    cache.crop(-DECODED)


def _training_step(model: HyperMLPForCausalLM, length: int) -> Work:
    tokens = random_tokens(VOCABULARY, 1, length)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def _bytes(cache: DynamicCache) -> int:
    """Return the memory of all tensors in the decoding states of a cache, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in _tensors(layer, set())
    }
    return sum(storages.values())


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an object, its attributes and containers."""
    if isinstance(thing, Tensor):
        yield thing
    elif id(thing) not in seen:
        seen.add(id(thing))
        inside = (
            thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        )
        attributes = vars(thing).values() if type(thing).__module__.startswith("hypermlp") else ()
        for part in (*inside, *attributes):
            yield from _tensors(part, seen)
