"""The study as data: its rows, its sizes, and what is trained for a row."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from hypermlp.errors import UserError
from hypermlp.label import PAPER_ROWS
from hypermlp.label import PROBABLE_READING as OTHER_READINGS
from hypermlp.layers.registry import mixer_name
from hypermlp.train.recipe import load_recipe

ROWS = [*PAPER_ROWS, *OTHER_READINGS.values()]
TUNING_ROWS = ["S-cg-q", "R-2o!", "R-pcg-q-12o", "G-pcg-q-12o"]  # in none of the claims' pairs
LEARNING_RATES = [2e-3, 4e-3, 8e-3, 1.6e-2]  # of `study tune`
HEADLINE_ROWS = ("G-cg-q-12o", "S-p", "S-pc", "R-cg-q-12o")
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
    rows: tuple[str, ...] = tuple(ROWS)
    """Labels or names of peers."""
    rates: tuple[float, ...] = ()
    """Learning rates that each row is tuned over, with ``tuning_seed``. Empty: every row has the recipe's rate."""
    widen: bool = False
    """Whether a row whose best rate is the lowest or highest one is tried at half or twice that rate as well."""
    tuning_seed: int = 1
    """The seed of the tuning. Its losses choose a rate and are not reported."""
    seeds: tuple[int, ...]
    """The seeds that are reported, for every row."""
    claimed_seeds: tuple[int, ...] = ()
    """Further seeds of the rows that claims use."""
    fewer_seeds: tuple[tuple[str, int], ...] = ()
    """(row, count): rows that are reported with the first ``count`` seeds only."""
    evaluate: bool = False
    """Whether every reported model is also evaluated on the suite ``local``."""
    loss: str
    """One of LOSSES."""
    mad: str = ""
    """The grid of MAD; empty for none."""
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
        ),
        rates=(4e-3, 8e-3, 1.6e-2),
        seeds=(2, 3),
        claimed_seeds=(4,),
        loss="validation",
        mad="mini",
        about="a language model of a million parameters on Python's own source, and MAD's mini grid: a night on two cores",
    ),
    "headline": Size(
        recipe="cpu-mini",
        changes=("model.match_parameters=G-cg-q-12o", "training.eval_every=50"),
        rows=HEADLINE_ROWS,
        rates=(4e-3, 8e-3, 1.6e-2, 3.2e-2),
        widen=True,
        seeds=(2, 3, 4, 5, 6),
        fewer_seeds=(("R-cg-q-12o", 3),),
        evaluate=True,
        loss="validation",
        about="`cpu-mini` with equal parameters, each row at its own best learning rate, fresh seeds: nine hours of one core",
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
    def rate(self) -> float:
        return float(self.recipe["training"]["learning_rate"])

    @property
    def title(self) -> str:
        return f"{self.mixer}, seed {self.seed}"

    @property
    def place(self) -> str:
        return f"lm/{re.sub(r'[^A-Za-z0-9.!-]', '_', self.mixer)}-{self.seed}"

    def say(self, result: dict[str, Any]) -> str:
        if result["loss"] is None:
            return f"diverged at learning rate {self.rate:g}: {result['diverged']}"
        return f"loss {result['loss']:.4f} with {result['parameters']:,} parameters, learning rate {self.rate:g}, {result['seconds']:.0f} s"


def find_size(name: str) -> Size:
    if name not in SIZES:
        raise UserError(f"unknown size {name!r}; allowed: {', '.join(SIZES)}")
    return SIZES[name]


def find_rows(labels: list[str], size: Size) -> list[str]:
    """Return checked labels and names of peers; "all" means all rows of the size."""
    if labels == ["all"]:
        return list(size.rows)
    return list(dict.fromkeys(mixer_name(label) for label in labels))


def lm_cell(size: Size, mixer: str, seed: int, rate: float | None = None) -> LmCell:
    """Return the training of one row. ``rate`` is its learning rate, which decays to a tenth; None for the recipe's own."""
    ours = [
        f"model.mixer={mixer}",
        f"name=study {mixer}",
        f"training.seed={seed}",
        "training.report_to=[]",
        "training.keep=1",
    ]
    if rate is not None:
        ours += [f"training.learning_rate={rate}", f"training.min_learning_rate={rate / 10}"]
    recipe = load_recipe(size.recipe, [*size.changes, *ours])
    return LmCell(mixer=mixer, recipe=recipe.to_dict(), loss=size.loss)


def lm_cells(
    size: Size, rows: list[str], claimed: set[str], rates: dict[str, float] | None = None
) -> Iterator[LmCell]:
    """Yield the reported trainings, seed by seed, each row at its rate in ``rates`` (the recipe's where it has none)."""
    fewer = dict(size.fewer_seeds)
    for number, seed in enumerate((*size.seeds, *size.claimed_seeds)):
        for row in rows:
            wanted = number < len(size.seeds) or row in claimed
            if wanted and number < fewer.get(row, number + 1):
                yield lm_cell(size, row, seed, (rates or {}).get(row))


def tuning_cells(size: Size, rows: list[str] = TUNING_ROWS) -> Iterator[LmCell]:
    for rate in LEARNING_RATES:
        for row in rows:
            yield lm_cell(size, row, size.tuning_seed, rate)
