"""The benchmark's protocol as data: what is varied and how it is trained, with reduced grids for machines
without a GPU.

A grid changes one setting at a time from the baseline. A cell is one training: a mixer, a task, its
settings, a learning rate and a weight decay.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from hypermlp.errors import UserError
from hypermlp.jobs.cells import Cell
from hypermlp.mad.settings import check_seed
from hypermlp.mad.tasks import SAMPLERS, SEED, TASKS, find_task
from hypermlp.validation import (
    NOT_NEGATIVE_NUMBER,
    POSITIVE,
    POSITIVE_NUMBER,
    check_fields,
    find_option,
    near_miss,
    one_of,
    optional,
    require,
)

Changes = dict[str, Any]
Value = TypeVar("Value")
SWITCHES = {  # fields of Training, with the published code's choice first
    "schedule": ("constant", "cosine"),
    "score": ("best", "last"),
    "accuracy": ("macro", "micro"),
    "precision": ("bfloat16", "float32"),
}
FIRST_TRAINING = {  # fields of Training when the first records were published
    "learning_rate", "weight_decay", "batch_size", "epochs", "evaluate_every", "schedule", "score",
    "accuracy", "precision", "solved",
}  # fmt: skip


def _each(name: str, *values: float) -> list[Changes]:
    return [{name: value} for value in values]


TRAINING_SETS = _each("num_train", 6400, 3200, 1600, 800)
RECALL = [{}, *_each("vocab_size", 32, 64, 128), *_each("seq_len", 256, 512, 1024), *TRAINING_SETS]
PUBLISHED: dict[str, list[Changes]] = {  # 66 settings, the baseline first
    "in-context-recall": RECALL,
    "noisy-in-context-recall": [
        {},
        *_each("vocab_size", 48, 80, 144),
        *_each("seq_len", 256, 512, 1024),
        *TRAINING_SETS,
        *_each("frac_noise", 0.4, 0.6, 0.8),
    ],
    "fuzzy-in-context-recall": RECALL,
    "memorization": [{}, *_each("vocab_size", 512, 1024, 2048, 4096, 8192)],
    "compression": [
        {},
        *_each("vocab_size", 32, 64, 128),
        *_each("seq_len", 64, 128, 256),
        *TRAINING_SETS,
    ],
    "selective-copying": [
        {},
        *_each("vocab_size", 32, 64, 128),
        *_each("seq_len", 512, 1024),
        *TRAINING_SETS,
        *_each("copied", 32, 64, 96),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a cell is trained and scored. The defaults are those of the published code."""

    learning_rate: float = field(default=1e-3, metadata=POSITIVE_NUMBER)
    weight_decay: float = field(default=0.0, metadata=NOT_NEGATIVE_NUMBER)
    """Weight decay of all parameters."""
    batch_size: int = field(default=128, metadata=POSITIVE)
    epochs: int = field(default=200, metadata=POSITIVE)
    evaluate_every: int | None = field(default=None, metadata=optional(POSITIVE))
    """Steps between evaluations on the test set; None for one evaluation per epoch."""
    schedule: str = field(default="constant", metadata=one_of(*SWITCHES["schedule"]))
    """"constant", or "cosine" from ``learning_rate`` to 1e-6 over the epochs (over the steps, if there is
    one epoch). The published code requests a cosine, but its framework ignores the request."""
    score: str = field(default="best", metadata=one_of(*SWITCHES["score"]))
    """"best" takes the score of the evaluation with the lowest perplexity, as the published code does;
    "last" that of the last evaluation."""
    accuracy: str = field(default="macro", metadata=one_of(*SWITCHES["accuracy"]))
    """Mean over the classes of each batch ("macro", as published) or over positions ("micro")."""
    precision: str = field(default="bfloat16", metadata=one_of(*SWITCHES["precision"]))
    """"bfloat16" (autocast, as published) or "float32"."""
    solved: float = field(default=0.999, metadata=NOT_NEGATIVE_NUMBER)
    """Stop when the accuracy of an evaluation exceeds this."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings, learning rates and weight decays to train every mixer with."""

    settings: dict[str, list[Changes]]
    """Changes of the baseline, by task."""
    training: dict[str, Training]
    """How cells are trained, by task."""
    learning_rates: dict[str, tuple[float, ...]]
    weight_decays: tuple[float, ...] = (0.0,)
    sampler: str = "published"
    width: int = 128
    about: str = field(default="", compare=False)
    """One-line description, for ``--help``."""


def _for_all(usual: Value, **special: Value) -> dict[str, Value]:
    """Return a value for every task: ``usual``, or the one named like the task with ``_`` for ``-``."""
    return {task: special.get(task.replace("-", "_"), usual) for task in TASKS}


_SMALL = Training(batch_size=32, epochs=1, evaluate_every=25, precision="float32")
_SMOKE: Changes = {"num_train": 64, "num_test": 32, "seq_len": 32}
GRIDS = {
    "full": Grid(
        settings=PUBLISHED,
        learning_rates=_for_all((1e-4, 5e-4, 1e-3)),
        weight_decays=(0.0, 0.1),
        training=_for_all(Training()),
        about="as published: 66 settings, 396 trainings for each mixer; for GPUs",
    ),
    "mini": Grid(
        settings={
            "in-context-recall": [{"num_train": 25_600, "num_test": 256}],
            "noisy-in-context-recall": [{"vocab_size": 80, "num_train": 25_600, "num_test": 256}],
            "fuzzy-in-context-recall": [{"num_train": 25_600, "num_test": 512}],
            "memorization": [{"vocab_size": 2048, "num_test": 512}],
            "compression": [{"num_train": 102_400, "num_test": 512}],
            "selective-copying": [{"seq_len": 128, "num_train": 28_800, "num_test": 256}],
        },
        learning_rates=_for_all((1e-3,), noisy_in_context_recall=(1e-3, 3e-3)),
        training=_for_all(
            _SMALL,
            memorization=replace(_SMALL, batch_size=128, epochs=200),
            compression=replace(_SMALL, batch_size=128),
        ),
        sampler="fast",
        about="each task once, two of them with larger vocabularies: minutes for each mixer on two cores",
    ),
    "smoke": Grid(
        settings=_for_all([_SMOKE], selective_copying=[{**_SMOKE, "copied": 4}]),
        learning_rates=_for_all((1e-3,)),
        training=_for_all(replace(_SMALL, evaluate_every=1)),
        sampler="fast",
        width=32,
        about="two steps of each task, in seconds",
    ),
}


@dataclass(frozen=True, kw_only=True)
class MadCell(Cell):
    """One training of a mixer on a task."""

    kind: ClassVar[str] = "mad"

    task: str
    settings: Changes
    training: Training
    sampler: str = field(metadata=one_of(*SAMPLERS))
    width: int = field(metadata=POSITIVE)
    seed: int

    @classmethod
    def identity(cls, settings: dict[str, Any]) -> dict[str, Any]:
        training = {
            name: value
            for name, value in settings["training"].items()
            if name in FIRST_TRAINING or value != getattr(Training, name)
        }
        return settings | {"training": training}

    def __post_init__(self) -> None:
        chosen = find_task(self.task).settings(**self.settings)  # raises before any training
        for name in ("num_train", "num_test"):
            require(name, getattr(chosen, name), getattr(chosen, name) > 0, "a positive integer")
        check_fields(self)
        check_seed(self.seed)

    @property
    def title(self) -> str:
        return f"{self.mixer}, {self.task}"

    @property
    def place(self) -> str:
        return f"{self.task}/{self.file_name}"

    def summary(self, result: dict[str, Any]) -> str:
        diverged = " (diverged)" if result["diverged"] else ""
        return f"{result['score']:.1%} after {result['steps']} steps{diverged}, {result['seconds']:.0f} s"


def changed(cell: MadCell, **changes: Any) -> MadCell:
    """Return the cell with other values of ``width``, ``seed``, ``sampler``, fields of Training or task
    settings.

    Names that are none of these raise.
    """
    own_names, training_names = ("width", "seed", "sampler"), [each.name for each in fields(Training)]
    allowed = [*find_task(cell.task).changes, *own_names, *training_names]
    for name in changes:
        if name not in allowed:
            note = near_miss(name, allowed)
            raise UserError(f"{cell.task} has no setting {name!r}{note}; allowed: {', '.join(allowed)}")
    own = {name: changes.pop(name) for name in own_names if name in changes}
    training = {name: changes.pop(name) for name in training_names if name in changes}
    return replace(cell, settings=cell.settings | changes, training=replace(cell.training, **training), **own)


def read_cell(settings: dict[str, Any]) -> MadCell:
    """Return the cell that a record's settings describe."""
    return MadCell(**{**settings, "training": Training(**settings["training"])})


def grid_of(cell: MadCell) -> str | None:
    """Return the name of the grid that contains the cell; None if a user changed it."""
    return next((name for name, grid in GRIDS.items() if cell in cells(cell.mixer, grid, [cell.task])), None)


def find_grid(name: str) -> Grid:
    return find_option("grid", name, GRIDS)


def cells(mixer: str, grid: Grid, tasks: list[str]) -> Iterator[MadCell]:
    """Yield the cells of one mixer on the given tasks."""
    for task in tasks:
        find_task(task)
        for settings, rate, decay in itertools.product(
            grid.settings[task], grid.learning_rates[task], grid.weight_decays
        ):
            yield MadCell(
                mixer=mixer,
                task=task,
                settings=settings,
                training=replace(grid.training[task], learning_rate=rate, weight_decay=decay),
                sampler=grid.sampler,
                width=grid.width,
                seed=SEED,
            )
