"""The benchmark's protocol as data: what is varied, how it is trained, and reduced grids for machines without a GPU.

One thing at a time is changed from the baseline, never two. A cell is one training: a mixer, a task, its settings, a learning
rate and a weight decay.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from hypermlp.config import require
from hypermlp.errors import UserError
from hypermlp.mad.settings import whole
from hypermlp.mad.tasks import SAMPLERS, TASKS, find_task

Changes = dict[str, Any]
SCHEDULES, SCORES, ACCURACIES, PRECISIONS = (
    ("constant", "cosine"),
    ("best", "last"),
    ("macro", "micro"),
    ("bfloat16", "float32"),
)

TRAINING_SETS = [{"num_train": n} for n in (6400, 3200, 1600, 800)]
LENGTHS = [{"seq_len": n} for n in (256, 512, 1024)]
PUBLISHED: dict[str, list[Changes]] = {  # 66 settings, the baseline first
    "in-context-recall": [{}, *({"vocab_size": n} for n in (32, 64, 128)), *LENGTHS, *TRAINING_SETS],
    "noisy-in-context-recall": [
        {},
        *({"vocab_size": n} for n in (48, 80, 144)),
        *LENGTHS,
        *TRAINING_SETS,
        *({"frac_noise": share} for share in (0.4, 0.6, 0.8)),
    ],
    "fuzzy-in-context-recall": [{}, *({"vocab_size": n} for n in (32, 64, 128)), *LENGTHS, *TRAINING_SETS],
    "memorization": [{}, *({"vocab_size": n} for n in (512, 1024, 2048, 4096, 8192))],
    "compression": [
        {},
        *({"vocab_size": n} for n in (32, 64, 128)),
        *({"seq_len": n} for n in (64, 128, 256)),
        *TRAINING_SETS,
    ],
    "selective-copying": [
        {},
        *({"vocab_size": n} for n in (32, 64, 128)),
        *({"seq_len": n} for n in (512, 1024)),
        *TRAINING_SETS,
        *({"copied": n} for n in (32, 64, 96)),
    ],
}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a cell is trained and scored. The defaults are what the published code does, which is not all that it says."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    """On all parameters."""
    batch_size: int = 128
    epochs: int = 200
    evaluate_every: int | None = None
    """Steps between evaluations on the test set; None for once an epoch."""
    schedule: str = "constant"
    """The published code asks for a "cosine" over the epochs, down to 1e-6, in a way that its framework ignores.
    With one epoch, a cosine over its steps."""
    score: str = "best"
    """From the evaluation of least perplexity ("best"), as the published code does without saying, or from the "last" one."""
    accuracy: str = "macro"
    """"macro": in each batch the mean over classes, as published; "micro": over positions. Both are always recorded."""
    precision: str = "bfloat16"
    """Autocast, as published, or "float32"."""
    solved: float = 0.999
    """Stop when an evaluation is above."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("schedule", SCHEDULES),
            ("score", SCORES),
            ("accuracy", ACCURACIES),
            ("precision", PRECISIONS),
        ):
            require(
                name, getattr(self, name), getattr(self, name) in allowed, " or ".join(map(repr, allowed))
            )
        for name in ("learning_rate", "weight_decay", "solved"):
            require(
                name,
                getattr(self, name),
                _number(getattr(self, name)) and getattr(self, name) >= 0,
                "a number, 0 or more",
            )
        require("learning_rate", self.learning_rate, self.learning_rate > 0, "positive")
        for name in ("batch_size", "epochs"):
            require(
                name,
                getattr(self, name),
                whole(getattr(self, name)) and getattr(self, name) > 0,
                "a whole number, 1 or more",
            )
        every = self.evaluate_every
        require(
            "evaluate_every",
            every,
            every is None or (whole(every) and every > 0),
            "a whole number, 1 or more, or None",
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Which settings, learning rates and weight decays; how each is trained."""

    settings: dict[str, list[Changes]]
    training: dict[str, Training]
    learning_rates: dict[str, tuple[float, ...]]
    weight_decays: tuple[float, ...] = (0.0,)
    sampler: str = "published"
    width: int = 128
    seed: int = 12345
    about: str = field(default="", compare=False)


Of = TypeVar("Of")


def _for_all(usual: Of, **special: Of) -> dict[str, Of]:
    return {task: special.get(task.replace("-", "_"), usual) for task in TASKS}


_SMALL = Training(batch_size=32, epochs=1, evaluate_every=25, precision="float32")
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
        settings={
            task: [
                {
                    "num_train": 64,
                    "num_test": 32,
                    "seq_len": 32,
                    **({"copied": 4} if "copying" in task else {}),
                }
            ]
            for task in TASKS
        },
        learning_rates=_for_all((1e-3,)),
        training=_for_all(replace(_SMALL, evaluate_every=1)),
        sampler="fast",
        width=32,
        about="two steps of everything, in seconds",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that defines a training: two cells with equal fields give equal results."""

    kind: ClassVar = "mad"

    mixer: str
    task: str
    settings: Changes
    training: Training
    sampler: str
    width: int
    seed: int

    def __post_init__(self) -> None:
        chosen = find_task(self.task).settings(**self.settings)  # says what is wrong before anything runs
        for name in ("num_train", "num_test"):
            require(name, getattr(chosen, name), getattr(chosen, name) > 0, "positive")
        require("sampler", self.sampler, self.sampler in SAMPLERS, " or ".join(map(repr, SAMPLERS)))
        require("width", self.width, whole(self.width) and self.width > 0, "a whole number, 1 or more")
        require(
            "seed",
            self.seed,
            whole(self.seed) and 0 <= self.seed < 2**32,
            "a whole number, 0 or more and below 2**32",
        )

    @property
    def title(self) -> str:
        return f"{self.mixer}, {self.task}"

    @property
    def place(self) -> str:
        return f"{self.task}/{re.sub(r'[^A-Za-z0-9.!@-]', '_', self.mixer)}"

    def say(self, result: dict[str, Any]) -> str:
        diverged = ", where it diverged" * result["diverged"]
        return f"{result['score']:.1%} after {result['steps']} steps{diverged}, {result['seconds']:.0f} s"


def changed(cell: Cell, **changes: Any) -> Cell:
    """The cell with other settings of the task, fields of Training, ``width``, ``seed`` or ``sampler``; unknown names raise."""
    of_training = {f.name for f in fields(Training)}
    own = {name: value for name, value in changes.items() if name in ("width", "seed", "sampler")}
    training = {name: value for name, value in changes.items() if name in of_training}
    settings = {name: value for name, value in changes.items() if name not in own and name not in training}
    return replace(
        cell, settings=cell.settings | settings, training=replace(cell.training, **training), **own
    )


def read_cell(settings: dict[str, Any]) -> Cell:
    """From a record's settings."""
    return Cell(**{**settings, "training": Training(**settings["training"])})


def grid_of(cell: Cell) -> str | None:
    """The grid that has it as it is."""
    return next((name for name, grid in GRIDS.items() if cell in cells(cell.mixer, grid, [cell.task])), None)


def find_grid(name: str) -> Grid:
    if name not in GRIDS:
        raise UserError(f"unknown grid {name!r}; allowed: {', '.join(GRIDS)}")
    return GRIDS[name]


def cells(mixer: str, grid: Grid, tasks: list[str]) -> Iterator[Cell]:
    """The trainings of one mixer."""
    for task in tasks:
        find_task(task)
        for changes, rate, decay in itertools.product(
            grid.settings[task], grid.learning_rates[task], grid.weight_decays
        ):
            chosen = replace(grid.training[task], learning_rate=rate, weight_decay=decay)
            yield Cell(
                mixer=mixer,
                task=task,
                settings=changes,
                training=chosen,
                sampler=grid.sampler,
                width=grid.width,
                seed=grid.seed,
            )
