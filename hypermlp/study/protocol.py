"""The study as data: its rows, its sizes, and the cells that train a row.

A row is a name with the changes of the recipe that it stands for (``row_changes``).
"""

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from hypermlp.errors import UserError
from hypermlp.jobs.cells import Cell
from hypermlp.label import PAPER_ROWS, PROBABLE_READING
from hypermlp.layers.canon import PLACES
from hypermlp.layers.registry import BASELINES, mixer_name
from hypermlp.mad.protocol import MadCell, cells, find_grid
from hypermlp.mad.tasks import TASKS
from hypermlp.study.claims import CLAIMED
from hypermlp.train.recipe import Recipe, essential, load_recipe
from hypermlp.validation import find_option

ROWS = [*PAPER_ROWS, *PROBABLE_READING.values()]
TUNING_ROWS = ["S-cg-q", "R-2o!", "R-pcg-q-12o", "G-pcg-q-12o"]  # no claim uses them
LEARNING_RATES = [2e-3, 4e-3, 8e-3, 1.6e-2]  # the grid of `study tune`
HEADLINE_ROWS = ("G-cg-q-12o", "S-p", "S-pc", "R-cg-q-12o")
CANON = "+canon"  # a row "S-p+canon" is S-p in blocks with Canon layers
MIXING_ROWS = (*HEADLINE_ROWS, "G-g-q-12o", f"G-g-q-12o{CANON}", f"S-p{CANON}", "fox")
FACTORIAL_ROWS = tuple(
    f"{base}-p{convolution.removesuffix(CANON)}{gates}{mix}{CANON * convolution.endswith(CANON)}"
    for base in "SRG"
    for convolution in ("", "c", CANON)
    for gates in ("", "g")
    for mix in ("", "-12o!")
)
NARROW_ROWS = tuple(  # the paper's row with everything, at its width of QK, and with Canon layers
    row for base in "SRG" for row in (f"{base}-pcg-q-12o", f"{base}-pg-q-12o{CANON}")
)
OWN_KEYS = {"mixer", "canon", "seed"}  # keys of a recipe in which the cells of one size differ
RATE_KEYS = {"learning_rate", "min_learning_rate"}  # and, at a size that tunes them, these
LOSSES = {
    "validation": "the loss of held-out documents after the last step",
    "train": "the loss on training documents, the mean of the last five evaluations, as in the paper",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One way to run the study. All its rows have the same data and the same order of examples."""

    recipe: str
    changes: tuple[str, ...] = ()
    """Overrides ``section.key=value``, as for ``hypermlp train --set``."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Labels or names of baselines; a label may end in CANON."""
    rates: tuple[float, ...] = ()
    """Learning rates to choose from for each row; if empty, every row has the recipe's rate."""
    softmax_rates: tuple[float, ...] = ()
    """Learning rates to choose from for labels of base S; if empty, ``rates``."""
    widen: bool = False
    """Whether a row whose best rate is the lowest or highest is also tried at half or twice that rate."""
    tuning_seed: int = 1
    """The seed that chooses rates. Its losses are not reported, unless it is among ``seeds``."""
    seeds: tuple[int, ...]
    """Reported seeds of every row."""
    claimed_seeds: tuple[int, ...] = ()
    """Further reported seeds of the rows that claims use."""
    fewer_seeds: tuple[tuple[str, int], ...] = ()
    """(row, count): rows that report only the first ``count`` seeds."""
    evaluate: bool = False
    """Whether every reported model is also evaluated on the suite ``local``."""
    loss: str
    """The reported loss: a key of LOSSES."""
    reference: str = ""
    """The row that the others are compared with, seed by seed; empty for none."""
    mad: str = ""
    """MAD grid to run the rows on; empty for none."""
    mad_tasks: tuple[str, ...] = ()
    """MAD tasks; empty for all."""
    about: str
    """One-line description, for ``--help``."""

    def rates_of(self, row: str) -> tuple[float, ...]:
        """Return the learning rates to choose from for a row."""
        return self.softmax_rates if row.startswith("S") and self.softmax_rates else self.rates

    def reported_seeds(self, row: str) -> tuple[int, ...]:
        """Return the seeds that a row reports."""
        seeds = self.seeds + (self.claimed_seeds if row in CLAIMED else ())
        return seeds[: dict(self.fewer_seeds).get(row)]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The MAD tasks to run the rows on."""
        return (self.mad_tasks or tuple(TASKS)) if self.mad else ()

    def mad_cells(self, row: str, *tasks: str) -> list[MadCell]:
        """Return the MAD trainings of a row, on the given tasks or on all."""
        return list(cells(row, find_grid(self.mad), list(tasks or self.tasks))) if self.mad else []

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What the settings of all cells have in common."""
        return self.shared(asdict(lm_cell(self, self.rows[0], self.tuning_seed)))

    def shared(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a cell without those in which the cells of this size differ."""
        recipe, own = essential(settings["recipe"]), OWN_KEYS | (RATE_KEYS if self.rates else set())
        sections = ("model", "data", "training")
        common = {
            section: {key: value for key, value in recipe[section].items() if key not in own}
            for section in sections
        }
        return common | {"loss": settings["loss"]}


# Where a row's rate was not tuned; the recipe has rates by mixer.
ONE_RATE = ("training.learning_rate=2e-3", "training.min_learning_rate=2e-4")
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
            *ONE_RATE,
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
            *ONE_RATE,
        ),
        rates=(4e-3, 8e-3, 1.6e-2),
        seeds=(2, 3),
        claimed_seeds=(4,),
        loss="validation",
        mad="mini",
        about="models of a million parameters, MAD's mini grid: 11 core hours, and 16 for MAD",
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
        reference="G-cg-q-12o",
        loss="validation",
        about="four mixers with equal parameters, each at its best learning rate: seven hours of one core",
    ),
    "full": Size(
        recipe="nanogpt-124m",
        seeds=(1337,),
        loss="train",
        mad="full",
        about="as published: 124M parameters, 20B tokens, 396 MAD trainings for each row; for a GPU cluster",
    ),
}


# The next two sizes have cells of ``headline``: run in one folder with it, they share its records.
SIZES["mixing"] = replace(
    SIZES["headline"],
    rows=MIXING_ROWS,
    about="headline, HyperGLU without convolution, it and S-p with Canon layers, FoX: six hours more",
)
SIZES["factorial"] = replace(
    SIZES["headline"],
    rows=(*FACTORIAL_ROWS, *NARROW_ROWS),
    rates=(8e-3, 1.6e-2),
    softmax_rates=(4e-3, 8e-3),
    widen=False,
    seeds=(1, 2),
    fewer_seeds=(),
    evaluate=False,
    reference="S-p",
    about="activation x mixing x gates x convolution, 42 rows with equal parameters: 17 hours of one core",
)


@dataclass(frozen=True, kw_only=True)
class LmCell(Cell):
    """One training of a language model, defined by its recipe."""

    kind: ClassVar[str] = "study-lm"

    recipe: dict[str, Any]
    loss: str
    """The reported loss: a key of LOSSES."""

    @classmethod
    def identity(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return settings | {"recipe": essential(settings["recipe"])}

    @property
    def seed(self) -> int:
        return int(self.recipe["training"]["seed"])

    @property
    def rate(self) -> float:
        return float(self.recipe["training"]["learning_rate"])

    @property
    def title(self) -> str:
        return f"{self.mixer}, seed {self.seed}, learning rate {self.rate:g}"

    def summary(self, result: dict[str, Any]) -> str:
        if result["loss"] is None:
            return f"diverged: {result['diverged']}"
        return f"loss {result['loss']:.4f}, {result['parameters']:,} parameters, {result['seconds']:.0f} s"

    @property
    def place(self) -> str:
        return f"lm/{self.file_name}-{self.seed}"


def find_size(name: str) -> Size:
    return find_option("size", name, SIZES)


def find_rows(names: list[str], size: Size) -> list[str]:
    """Return the rows for labels and names of baselines, checked; "all" means all rows of the size."""
    return list(size.rows) if names == ["all"] else list(dict.fromkeys(map(row_name, names)))


def row_name(name: str) -> str:
    """Return a label (which may end in CANON) in its usual spelling, or the name of a baseline."""
    base = mixer_name(name.removesuffix(CANON))
    if name.endswith(CANON) and base in BASELINES:
        raise UserError(f"row {name!r}: only labels have Canon layers at all four places")
    return base + CANON if name.endswith(CANON) else base


def row_changes(row: str) -> list[str]:
    """Return the overrides ``section.key=value`` of the recipe that a row stands for."""
    canon = [f"model.canon={''.join(PLACES)}"] if row.endswith(CANON) else []
    return [f"model.mixer={row.removesuffix(CANON)}", *canon]


@functools.cache
def _row_recipe(name: str, changes: tuple[str, ...], row: str) -> Recipe:
    own = (*row_changes(row), f"name=study {row}", "training.report_to=[]", "training.keep=1")
    return load_recipe(name, [*changes, *own])


def lm_cell(size: Size, row: str, seed: int, rate: float | None = None) -> LmCell:
    """Return one training of a row. ``rate`` replaces the recipe's learning rate; it decays to a tenth."""
    recipe = _row_recipe(size.recipe, size.changes, row)
    training = replace(recipe.training, seed=seed)
    if rate is not None:
        training = replace(training, learning_rate=rate, min_learning_rate=rate / 10)
    return LmCell(mixer=row, recipe=replace(recipe, training=training).to_dict(), loss=size.loss)


def lm_cells(size: Size, rows: list[str], rates: dict[str, float] | None = None) -> Iterator[LmCell]:
    """Yield the reported trainings, seed by seed. Rows that ``rates`` lacks have the recipe's rate."""
    for seed in (*size.seeds, *size.claimed_seeds):
        for row in rows:
            if seed in size.reported_seeds(row):
                yield lm_cell(size, row, seed, (rates or {}).get(row))


def tuning_cells(size: Size, rows: list[str] = TUNING_ROWS) -> Iterator[LmCell]:
    """Yield the trainings of `study tune`."""
    for rate in LEARNING_RATES:
        for row in rows:
            yield lm_cell(size, row, size.tuning_seed, rate)
