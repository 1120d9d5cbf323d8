"""Loss by position: how well a model predicts a token, by the number of tokens that come before it.

The texts are held out from training. Each is a piece of one document, so a position says nothing about where
in a document it is; pieces do not overlap.

Shapes: N texts, n positions.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.errors import UserError
from hypermlp.evals.variants import Variant
from hypermlp.layers.resizing import DEFAULT_METHOD
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.loading import load, model_folder
from hypermlp.reporting.table import Table
from hypermlp.train.data import PreparedData, prepare
from hypermlp.train.recipe import DataSettings

KIND = "eval-positions"  # of records
PER_OCTAVE = 4  # points of the grid between a position and twice that position
BELOW = 3  # octaves of the grid below the trained context; what is before them is one bucket
TIMES = 8
RECOMPUTED = 8  # predictions in a bucket that are computed anew from a window, per text
BATCH = 8  # texts at once
Row = dict[str, Any]


class Trained(NamedTuple):
    """A run of ``hypermlp train``: its model, and what it was trained on."""

    name: str
    model: HyperMLPForCausalLM
    context: int
    seed: int
    data: DataSettings


def read_trained(checkpoint: str) -> Trained:
    """Load a run, or a model in a run's folder; ``recipe.json`` of the run names its data and context."""
    folder = model_folder(checkpoint)
    run = next((place for place in (folder, *folder.parents[:2]) if (place / "recipe.json").is_file()), None)
    if run is None:
        raise UserError(
            f"{checkpoint} is not part of a run: no recipe.json says which text is held out; "
            "allowed: runs of `hypermlp train`, and for a model of `hypermlp extend` its run, such as "
            "RUN@repeat with --length"
        )
    try:
        recipe = json.loads((run / "recipe.json").read_text())
        data, seed = DataSettings(**recipe["data"]), int(recipe["training"]["seed"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run / 'recipe.json'} is damaged: {error}; restore it") from error
    return Trained(run.name, load(checkpoint)[0], data.context, seed, data)


def held_out_texts(prepared: PreparedData, length: int, count: int) -> Tensor:
    """Return up to ``count`` pieces of held-out documents, ``[N, length + 1]``, spread over all of them."""
    tokens, begins = prepared.tokens["validation"], [*prepared.begins["validation"].tolist()]
    ends = [*begins[1:], len(tokens)]
    firsts = [
        first
        for begin, end in zip(begins, ends, strict=True)
        for first in range(begin, end - length, length + 1)
    ]
    if not firsts:
        longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
        raise UserError(
            f"no held-out document has {length + 1} tokens, the longest has {longest}; ask for a shorter "
            "--length, or train with a larger data.validation"
        )
    chosen = np.linspace(0, len(firsts) - 1, min(count, len(firsts))).round().astype(int)
    pieces = [tokens[firsts[index] : firsts[index] + length + 1].astype(np.int64) for index in chosen]
    return torch.from_numpy(np.stack(pieces))


def grid(context: int, length: int) -> list[int]:
    """Return the edges of the buckets: 0, then ``context`` times powers of the fourth root of 2."""
    powers = np.arange(-BELOW * PER_OCTAVE, PER_OCTAVE * np.log2(length / context) + 1e-9)
    edges = {round(float(context * 2 ** (power / PER_OCTAVE))) for power in powers}
    return sorted({0, length, *(edge for edge in edges if 0 < edge < length)})


@torch.no_grad()
def losses(model: HyperMLPForCausalLM, texts: Tensor) -> Tensor:
    """Return the loss of every next token, ``[N, n + 1] -> [N, n]``."""
    by_batch = []
    for batch in texts.split(BATCH):
        logits = model(batch[:, :-1].to(model.device), use_cache=False).logits.float()
        by_batch.append(F.cross_entropy(logits.mT, batch[:, 1:].to(model.device), reduction="none").cpu())
    return torch.cat(by_batch)


@torch.no_grad()
def recomputed_losses(model: HyperMLPForCausalLM, texts: Tensor, window: int, edges: list[int]) -> Tensor:
    """Return losses of predictions from the last ``window`` tokens alone; NaN where none is computed.

    Up to ``window`` tokens all predictions are computed, then RECOMPUTED of every bucket.
    """
    by_token = torch.full((len(texts), texts.shape[1] - 1), torch.nan)
    by_token[:, :window] = losses(model, texts[:, : window + 1])
    for low, high in itertools.pairwise(edges):
        for seen in {round(edge) for edge in np.linspace(max(low, window) + 1, high, RECOMPUTED)}:
            if seen > max(low, window):
                by_token[:, seen - 1] = losses(model, texts[:, seen - window : seen + 1])[:, -1]
    return by_token


def by_position(trained: Trained, variant: Variant, texts: Tensor, context: int) -> Row:
    """Return the losses of one variant, as a row of a record; ``context`` is that of the grid."""
    length = texts.shape[1] - 1
    edges = grid(context, length)
    model = variant.applied(trained.model, trained.context, length)
    if variant.kind == "recomputed":
        by_token = recomputed_losses(model, texts, variant.window(trained.context), edges)
    else:
        by_token = losses(model, texts)
    means = torch.stack([part.nanmean(1) for part in by_token.split(np.diff(edges).tolist(), dim=1)], dim=1)
    if not torch.isfinite(means).all():
        raise UserError(f"{trained.name}{variant.name} has non-finite losses; is the model damaged?")
    spread = means.std(0) / len(texts) ** 0.5 if len(texts) > 1 else torch.zeros(len(edges) - 1)
    return {
        "name": f"{trained.name}{variant.name}",
        "mixer": ", ".join(dict.fromkeys(trained.model.config.mixers)),
        "variant": variant.name.removeprefix("@"),
        "seed": trained.seed,
        "trained_context": trained.context,
        "parameters": trained.model.num_parameters(),
        "texts": len(texts),
        "edges": edges,
        "loss": means.mean(0).tolist(),
        "error": spread.tolist(),
    }


def evaluate_positions(
    names: list[str], *, length: int | None, texts: int, report: Callable[[str], None]
) -> Iterable[tuple[Row, int]]:
    """Yield a row for each of ``names`` (RUN or RUN@VARIANT), and the context that the grid belongs to.

    ``length`` is the number of positions, None for 8 times the shortest trained context of the runs.
    """
    variants = [Variant.parse(name) for name in names]
    runs = {source: read_trained(source) for source in dict.fromkeys(variant.source for variant in variants)}
    first = next(iter(runs.values()))
    for run in runs.values():
        for key in ("source", "tokenizer", "validation", "text_field", "split", "limit"):
            if getattr(run.data, key) != getattr(first.data, key):
                raise UserError(
                    f"data.{key} of {run.name} is {getattr(run.data, key)!r}, of {first.name} "
                    f"{getattr(first.data, key)!r}; losses on different texts cannot be compared"
                )
    context = min(run.context for run in runs.values())
    length = length or TIMES * context
    pieces = held_out_texts(prepare(first.data), length, texts)
    few = f" (there {'is' if len(pieces) == 1 else 'are'} no more)" if len(pieces) < texts else ""
    count = f"{len(pieces)} held-out text{'' if len(pieces) == 1 else 's'}"
    report(f"{count} of {length} tokens{few}, {length / context:.3g} times the trained context")
    for variant in variants:
        present = runs[variant.source].model.config.max_position_embeddings
        if not variant.kind and length > present:
            report(
                f"{variant.source}: context extended from {present} to {length} without training (learned "
                f"slots by {DEFAULT_METHOD!r}); {variant.source}@window and other variants: "
                "docs/long-context.md"
            )
        yield by_position(runs[variant.source], variant, pieces, context), context


def octaves(row: Row, context: int) -> dict[str, float]:
    """Return the mean loss in the two halves of the trained context, and in every octave beyond.

    The last octave ends where the texts end.
    """
    last, ends = row["edges"][-1], [0, round(context / 2)]  # rounded as in ``grid``
    while ends[-1] < last:
        ends.append(context * 2 ** (len(ends) - 2))
    within = sorted({last, *(end for end in ends if end < last)})
    return {f"{low:,} to {high:,}": mean_loss(row, low, high) for low, high in itertools.pairwise(within)}


def mean_loss(row: Row, low: int, high: int) -> float:
    """Return the mean loss between two edges of the grid."""
    edges, loss = np.array(row["edges"]), np.array(row["loss"])
    inside = (edges[:-1] >= low) & (edges[1:] <= high)
    return float(np.average(loss[inside], weights=np.diff(edges)[inside]))


def headline(row: Row, context: int) -> str:
    """Return a line with the mean loss within the trained context, and with that of the last positions."""
    first, last = row["edges"][-2:]
    within = min(context, last)
    line = f"{row['name']}: {mean_loss(row, 0, within):.3f} nats per token at the positions 0 to {within:,}"
    if last > context:
        line += f" (the trained context), {row['loss'][-1]:.3f} at {first:,} to {last:,}"
    return line


def position_table(rows: list[Row], context: int) -> Table:
    """Return a table of the losses of all variants in nats per token, by octaves of positions."""
    titles = list(octaves(rows[0], context))
    lines = [[row["name"], *(f"{value:.3f}" for value in octaves(row, context).values())] for row in rows]
    return Table(["loss at positions", *titles], lines)
