"""The study as data: its rows, its sizes, and what is trained for a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from hypermlp.label import PAPER_ROWS
from hypermlp.layers.registry import mixer_name
from hypermlp.train.recipe import load_recipe

OTHER_READINGS = {"S-g-q": "S-cg-q", "R-2!": "R-2o!"}  # what the paper probably ran where its label says otherwise; docs/study.md
ROWS = [*PAPER_ROWS, *OTHER_READINGS.values()]
TUNING_ROWS = ["S-cg-q", "R-2o!", "R-pcg-q-12o", "G-pcg-q-12o"]  # in none of the claims' pairs
LEARNING_RATES = [2e-3, 4e-3, 8e-3, 1.6e-2]
LOSSES = {
    "validation": "of held-out documents, after the last step",
    "train": "estimated on the training documents, the mean of the last five evaluations, as the paper does",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One way to run all rows: the same data, order and seeds for each."""

    recipe: str
    changes: tuple[str, ...] = ()
    """``section.key=value``, as for ``hypermlp train --set``."""
    seeds: tuple[int, ...]
    """Of rows that the claims use; the other rows have the first one."""
    loss: str
    """One of LOSSES."""
    mad: str
    """The grid."""
    mad_tasks: tuple[str, ...] = ()
    """Empty for all."""
    about: str


SIZES = {
    "smoke": Size(
        recipe="cpu-mini",
        changes=(
            "model.hidden_size=32",
            "model.num_hidden_layers=1",
            "data.context=32",
            "data.limit=200000",
            "training.steps=2",
            "training.batch_tokens=128",
            "training.micro_batch=4",
            "training.warmup_steps=1",
            "training.eval_every=1",
            "training.eval_sequences=4",
            "training.save_every=1",
        ),
        seeds=(1,),
        loss="validation",
        mad="smoke",
        mad_tasks=("in-context-recall", "compression"),
        about="two steps of every row, in about a minute",
    ),
    "mini": Size(
        recipe="cpu-mini",
        changes=(
            "training.steps=400",
            "training.batch_tokens=4096",
            "training.micro_batch=16",
            "training.eval_every=50",
            "training.learning_rate=1.6e-2",  # the best of `hypermlp study tune`: docs/results/study-tune
            "training.min_learning_rate=1.6e-3",
        ),
        seeds=(1, 2),
        loss="validation",
        mad="mini",
        about="a language model of a million parameters on Python's own source, and MAD's mini grid: a night on two cores",
    ),
    "full": Size(
        recipe="nanogpt-124m",
        seeds=(1337,),
        loss="train",
        mad="full",
        about="as published: 124M parameters, 20B tokens, 396 trainings on MAD for each row; for a cluster of GPUs",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LmCell:
    """One language model: everything that defines its training is in the recipe."""

    kind: ClassVar = "study-lm"

    mixer: str
    recipe: dict[str, Any]
    loss: str

    @property
    def seed(self) -> int:
        return int(self.recipe["training"]["seed"])

    @property
    def title(self) -> str:
        return f"{self.mixer}, seed {self.seed}"

    @property
    def place(self) -> str:
        return f"lm/{re.sub(r'[^A-Za-z0-9.!-]', '_', self.mixer)}-{self.seed}"

    def say(self, result: dict[str, Any]) -> str:
        rate = self.recipe["training"]["learning_rate"]
        return f"loss {result['loss']:.4f} with {result['parameters']:,} parameters, learning rate {rate:g}, {result['seconds']:.0f} s"


def find_size(name: str) -> Size:
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}; allowed: {', '.join(SIZES)}")
    return SIZES[name]


def find_rows(labels: list[str]) -> list[str]:
    """Labels and names of peers, or "all"; each one is checked."""
    if labels == ["all"]:
        return ROWS
    return list(dict.fromkeys(mixer_name(label) for label in labels))


def lm_cell(size: Size, mixer: str, seed: int, *changes: str) -> LmCell:
    ours = [f"model.mixer={mixer}", f"name=study {mixer}", f"training.seed={seed}", "training.report_to=[]", "training.keep=1"]
    recipe = load_recipe(size.recipe, [*size.changes, *ours, *changes])
    return LmCell(mixer=mixer, recipe=recipe.to_dict(), loss=size.loss)


def lm_cells(size: Size, rows: list[str], claimed: set[str]) -> Iterator[LmCell]:
    """First every row once, then the further seeds of the rows that claims use."""
    yield from (lm_cell(size, row, size.seeds[0]) for row in rows)
    yield from (lm_cell(size, row, seed) for seed in size.seeds[1:] for row in rows if row in claimed)


def tuning_cells(size: Size, rows: list[str] = TUNING_ROWS) -> Iterator[LmCell]:
    for rate in LEARNING_RATES:
        for row in rows:
            yield lm_cell(size, row, size.seeds[0], f"training.learning_rate={rate}", f"training.min_learning_rate={rate / 10}")
