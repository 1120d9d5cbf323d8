"""Read the records of a size: which of its cells exist in a folder, and their losses, rates and verdicts."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from hypermlp.errors import UserError
from hypermlp.jobs.cells import cell_record, record_path, recorded
from hypermlp.label import PAPER_ROWS, PROBABLE_READING
from hypermlp.mad.report import AVERAGE, Scores, published_value, summarize
from hypermlp.mad.tasks import TASKS
from hypermlp.reporting.records import read_record
from hypermlp.study.claims import Verdict, judge
from hypermlp.study.intervals import Interval, spearman
from hypermlp.study.predictions import judge_predictions
from hypermlp.study.protocol import ROWS, SIZES, LmCell, Size, lm_cell
from hypermlp.study.thresholds import THRESHOLD_ROW, Curve, mean_curve, thresholds
from hypermlp.study.tuning import Losses, best_rate, considered, loss_of, possible_rates, untried_rates

PAPER_DIVERGED = {"S"}  # rows whose loss in the paper is a late divergence, not a target
ENOUGH = 4  # rows that a rank correlation needs
PAPER_LABEL = {reading: label for label, reading in PROBABLE_READING.items()}
Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The language models of one row at one size, as far as they are recorded."""

    label: str
    rate: float | None = None
    """Learning rate; None where all rows have the recipe's rate, or where none has been chosen yet."""
    untried: tuple[float, ...] = ()
    """Learning rates that the row must still be trained at before its rate can be chosen."""
    tuned: Mapping[float, Record] = field(default_factory=dict)
    """Records of the tuning seed by learning rate."""
    reported: Mapping[int, Record] = field(default_factory=dict)
    """Records of the reported seeds at the row's rate."""
    paths: frozenset[Path] = frozenset()
    """Files of all these records."""

    @property
    def records(self) -> list[Record]:
        return [*self.tuned.values(), *self.reported.values()]

    @property
    def tuning(self) -> Losses:
        """Losses of the tuning seed by learning rate."""
        return {rate: loss_of(record["results"]) for rate, record in self.tuned.items()}

    @cached_property
    def results(self) -> dict[int, dict[str, Any]]:
        """Results by reported seed, without seeds that diverged."""
        found = {seed: record["results"] for seed, record in self.reported.items()}
        return {seed: result for seed, result in found.items() if result["loss"] is not None}

    @property
    def diverged(self) -> int:
        """Reported seeds that diverged."""
        return len(self.reported) - len(self.results)

    @property
    def losses(self) -> dict[int, float]:
        """Losses by reported seed, without seeds that diverged."""
        return {seed: result["loss"] for seed, result in self.results.items()}

    @property
    def loss(self) -> float:
        return fmean(self.losses.values())

    @property
    def parameters(self) -> int:
        return int(self._any("parameters"))

    @property
    def forward_flops_per_token(self) -> int:
        return int(self._any("forward_flops_per_token"))

    @property
    def training_flops(self) -> float:
        """FLOPs of the whole training: the backward pass costs twice the forward pass."""
        return 3.0 * self.forward_flops_per_token * self._any("tokens")

    def _any(self, key: str) -> float:
        return float(next(result[key] for result in self.results.values()))

    @property
    def curves(self) -> dict[int, Curve]:
        """Validation losses by seed."""
        return {
            seed: [(step, loss) for step, loss in result["curves"]["validation"]]
            for seed, result in self.results.items()
        }

    @cached_property
    def curve(self) -> Curve:
        """The mean of the curves over the seeds."""
        return mean_curve(list(self.curves.values()))

    @property
    def scores(self) -> dict[str, dict[int, float]]:
        """Columns of the suite ``local`` by seed, where the models were evaluated."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for seed, result in self.results.items():
            for column, score in result.get("local", {}).items():
                found[column][seed] = score["value"]
        return dict(found)

    @property
    def paper_loss(self) -> float | None:
        """The paper's loss; for a relabelled row, the loss of the paper's row it stands for."""
        return PAPER_ROWS[PAPER_LABEL.get(self.label, self.label)].loss if self.label in ROWS else None

    @property
    def reason(self) -> str:
        """Why the row has records and no loss; empty if it has a loss, or no records."""
        if self.losses or not self.records:
            return ""
        if self.reported:
            return "all reported seeds diverged"
        if self.untried:
            return f"not trained at learning rate {', '.join(f'{rate:g}' for rate in self.untried)} yet"
        return "only the tuning seed has been run"


def read_row(size: Size, label: str, folder: Path, rate: float | None = None) -> Row:
    """Read the cells of a row that have a record. ``rate`` is its rate at a size that does not tune rates."""
    paths = set()

    def at(seed: int, rate: float | None) -> Record | None:
        cell = lm_cell(size, label, seed, rate)
        if record := cell_record(folder, cell):
            paths.add(record_path(folder, cell))
        return record

    tuned = {rate: record for rate in possible_rates(size, label) if (record := at(size.tuning_seed, rate))}
    losses = considered(size, label, {rate: loss_of(record["results"]) for rate, record in tuned.items()})
    untried = untried_rates(size, label, losses)
    if losses and not untried:
        rate = best_rate(losses)
    seeds = () if untried else size.reported_seeds(label)
    reported = {seed: record for seed in seeds if (record := at(seed, rate))}
    return Row(label, rate, tuple(untried), tuned, reported, frozenset(paths))


@dataclass(frozen=True)
class Study:
    """Everything that the reports of a study show."""

    size: Size
    all_rows: dict[str, Row]
    """All rows of the size, and others that have records, in the order of the paper's table."""
    mad: Scores = field(default_factory=lambda: Scores({}))
    unlisted: tuple[str, ...] = ()
    """Names of records that are not used, because the size has no such cells."""

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Rows that have a loss."""
        return {label: row for label, row in self.all_rows.items() if row.losses}

    @property
    def labels(self) -> list[str]:
        return list(self.all_rows)

    @property
    def left_out(self) -> dict[str, str]:
        """Labels that have records but no loss to report, with the reason."""
        return {label: row.reason for label, row in self.all_rows.items() if row.reason}

    @property
    def newest(self) -> Record:
        """The record that was made last."""
        return max((record for row in self.all_rows.values() for record in row.records), key=_created)

    @property
    def data(self) -> str:
        """Digest of the prepared data; empty if all trainings diverged."""
        results = (record["results"] for row in self.all_rows.values() for record in row.records)
        return next((result["data_digest"] for result in results if "data_digest" in result), "")

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """The four losses of hypermlp/study/thresholds.py; none if their row was not run."""
        row = self.rows.get(THRESHOLD_ROW)
        return () if row is None else thresholds(row.curve)

    @property
    def like_paper(self) -> bool:
        """Whether the study has the rows of the paper's table, so that its claims can be judged."""
        return set(ROWS) <= set(self.size.rows)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the paper's claims; none at a size that lacks rows of the paper's table."""
        if not self.like_paper:
            return []
        losses = {label: row.losses for label, row in self.rows.items()}
        return [*judge(losses), judge_predictions(self.mad.scores)]

    @property
    def comparable(self) -> list[str]:
        """The paper's own labels whose loss in the paper is a fair target, in a study like the paper's."""
        fair = PAPER_ROWS.keys() - PAPER_DIVERGED
        return [label for label in self.rows if self.like_paper and label in fair]

    @cached_property
    def rank_correlation(self) -> Interval | None:
        """Rank correlation of our losses with the paper's; None for too few rows."""
        pairs = [(self.rows[label].loss, PAPER_ROWS[label].loss) for label in self.comparable]
        return spearman(*map(list, zip(*pairs, strict=True))) if len(pairs) >= ENOUGH else None

    @cached_property
    def mad_correlations(self) -> dict[str, tuple[int, Interval]]:
        """Number of rows, and rank correlation of our scores with the paper's, by MAD task and for AVERAGE.

        Columns with too few rows are left out, and columns in which all rows are equal.
        """
        found = {}
        for column in (*TASKS, AVERAGE):
            pairs = [
                (ours, published)
                for label in PAPER_ROWS
                if (ours := self.mad.score(label, column)) is not None
                and (published := published_value(label, column)) is not None
            ]
            if len(pairs) >= ENOUGH and all(len(set(scores)) > 1 for scores in zip(*pairs, strict=True)):
                found[column] = (len(pairs), spearman(*map(list, zip(*pairs, strict=True))))
        return found


def _created(record: Record) -> str:
    return str(record["created"])


def read_study(folder: Path, size: Size | None = None) -> Study:
    """Read the records that ``hypermlp study run`` wrote to a folder.

    ``size`` defaults to the size that has the most of the recorded rows and seeds.
    """
    paths = sorted((folder / "lm").glob("*.json"))
    if not paths:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; give one with records, such as docs/results/headline, or "
                f"make it with `hypermlp study run --out {folder}`"
            )
        raise UserError(
            f"{folder} has no records of language models; `hypermlp study run --out {folder}` makes them"
        )
    settings = [read_record(path, LmCell.kind)["settings"] for path in paths]
    size = size or _recorded_size(settings, folder)
    labels = {*size.rows, *(each["mixer"] for each in settings if size.shared(each) == size.settings)}
    rows = {label: read_row(size, label, folder) for label in sorted(labels, key=_order)}
    used = frozenset().union(*(row.paths for row in rows.values()))
    study = Study(
        size=size,
        all_rows=rows,
        mad=_mad_scores(size, rows, folder / "mad"),
        unlisted=tuple(path.stem for path in paths if path not in used),
    )
    if not study.rows and not any(row.tuned for row in rows.values()):
        reason = "all trainings diverged" if used else "the size of the study has none of its cells"
        raise UserError(f"{folder} has no loss to report: {reason}")
    return study


def _recorded_size(settings: list[dict[str, Any]], folder: Path) -> Size:
    """Return the size that has the most of these cells, by row and seed."""

    def count(size: Size) -> int:
        seeds = {row: {size.tuning_seed, *size.reported_seeds(row)} for row in size.rows}
        return sum(
            each["recipe"]["training"]["seed"] in seeds.get(each["mixer"], ())
            for each in settings
            if size.shared(each) == size.settings
        )

    counts = {name: count(size) for name, size in SIZES.items()}
    best = max(counts, key=counts.__getitem__)
    if not counts[best]:
        raise UserError(
            f"{folder} has no records of a size of this version ({', '.join(SIZES)}): their recipes differ; "
            "`hypermlp report` shows records of any recipe"
        )
    return SIZES[best]


def _order(label: str) -> tuple[int, str]:
    return (ROWS.index(label) if label in ROWS else len(ROWS), label)


def _mad_scores(size: Size, labels: Iterable[str], folder: Path) -> Scores:
    """Return the MAD scores, without tasks of which a row has only some of the cells."""
    found = []
    for label, task in itertools.product(labels, size.tasks):
        wanted = [(cell, recorded(folder, cell)) for cell in size.mad_cells(label, task)]
        done = [(cell, result) for cell, result in wanted if result is not None]
        found += done if len(done) == len(wanted) else []
    return summarize(found)
