"""Read the records of a study: a row for each label, the rank correlation with the paper, and the verdicts.

A study can be tuned: its rows are trained at several learning rates with a tuning seed, and report other
seeds at the best rate. The tuning seed of a row is the seed with the most learning rates, if it has more than
one.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from hypermlp.errors import UserError
from hypermlp.jobs.cells import finite_fields
from hypermlp.label import PAPER_ROWS, PROBABLE_READING
from hypermlp.mad.protocol import MadCell, cells, find_grid, read_cell
from hypermlp.mad.report import AVERAGE, Scores, published_value, summarize
from hypermlp.mad.tasks import TASKS
from hypermlp.reporting.records import read_record
from hypermlp.study.claims import Verdict, judge, pair_name
from hypermlp.study.intervals import Interval, spearman
from hypermlp.study.predictions import judge_predictions
from hypermlp.study.protocol import ROWS, LmCell, Size, shared_settings, size_of
from hypermlp.study.thresholds import THRESHOLD_ROW, Curve, mean_curve, steps_to, thresholds
from hypermlp.study.tuning import Losses, best_rate, considered, loss_of, untried_rates

PAPER_DIVERGED = {"S"}  # rows whose loss in the paper is a late divergence, not a target
ENOUGH = 4  # rows that a rank correlation needs
PAPER_LABEL = {reading: label for label, reading in PROBABLE_READING.items()}
Runs = dict[int, dict[float, dict[str, Any]]]  # seed -> learning rate -> results


@dataclass(frozen=True)
class Row:
    """The reported language models of one label."""

    label: str
    losses: dict[int, float]
    """Losses by seed, without seeds that diverged."""
    parameters: int
    forward_flops_per_token: int
    curves: dict[int, Curve]
    """Validation losses by seed."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """Columns of the suite ``local`` by seed, where the models were evaluated."""
    rate: float | None = None
    """Learning rate in a tuned study; None if all rows have the recipe's rate."""
    diverged: int = 0
    """Reported seeds that diverged."""

    @property
    def loss(self) -> float:
        return fmean(self.losses.values())

    @cached_property
    def curve(self) -> Curve:
        """The mean of the curves over the seeds."""
        return mean_curve(list(self.curves.values()))

    @property
    def paper_loss(self) -> float | None:
        """The paper's loss; for a relabelled row, the loss of the paper's row it stands for."""
        return PAPER_ROWS[PAPER_LABEL.get(self.label, self.label)].loss if self.label in ROWS else None


@dataclass(frozen=True)
class Study:
    """Everything that the reports of a study show."""

    rows: dict[str, Row]
    left_out: dict[str, str]
    """Labels that have records but no loss to report, with the reason."""
    mad: Scores
    settings: dict[str, Any]
    """The part of the recipe that all language models share."""
    machine: dict[str, Any]
    created: str
    data: str
    """Digest of the prepared data."""
    size: Size | None
    """The size that the records belong to; None if no size has their settings."""
    tuning: dict[str, Losses]
    """Losses of the tuning seed by row and learning rate; empty if the study is not tuned."""

    @property
    def reference(self) -> str:
        """The row that the others are compared with; empty for none."""
        return self.size.reference if self.size else ""

    @property
    def labels(self) -> list[str]:
        """All rows that the study should have, in the order of the paper's table; others after them."""
        found = self.rows.keys() | self.left_out.keys() | (set(self.size.rows) if self.size else set())
        return sorted(found, key=_order)

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """The four losses of hypermlp/study/thresholds.py; none if their row was not run."""
        row = self.rows.get(THRESHOLD_ROW)
        return () if row is None else thresholds(row.curve)

    @property
    def tuned(self) -> bool:
        """Whether rows have learning rates of their own."""
        return bool(self.tuning)

    @property
    def like_paper(self) -> bool:
        """Whether the study has the rows of the paper's table, so that its claims can be judged."""
        return self.size is None or set(ROWS) <= set(self.size.rows)

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
        return [
            label
            for label in self.rows
            if self.like_paper and label in PAPER_ROWS and label not in PAPER_DIVERGED
        ]

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


def read_study(folder: Path) -> Study:
    """Read the records that ``hypermlp study run`` wrote to a folder."""
    records = [read_record(path, LmCell.kind) for path in sorted((folder / "lm").glob("*.json"))]
    if not records:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}; give one with records, such as docs/results/headline, or "
                f"make it with `hypermlp study run --out {folder}`"
            )
        raise UserError(
            f"{folder} has no records of language models; `hypermlp study run --out {folder}` makes them"
        )
    runs = _runs_by_label(records)
    size = size_of(records[0]["settings"], set(runs))
    tuned = any(len(rates) > 1 for seeds in runs.values() for rates in seeds.values())
    if size is not None and size.rates:  # a study that has begun with its tuning, at one rate so far
        tuned = tuned or {seed for seeds in runs.values() for seed in seeds} == {size.tuning_seed}
    settings = _shared_settings([record["settings"] for record in records], folder, tuned)
    rows: dict[str, Row] = {}
    left_out: dict[str, str] = {}
    for label in sorted(runs, key=_order):
        try:
            rate, results = _reported(label, runs[label], size) if tuned else _all_seeds(runs[label])
        except NotTunedError as reason:
            left_out[label] = str(reason)
            continue
        if any(result["loss"] is not None for result in results.values()):
            rows[label] = _row(label, results, rate if tuned else None)
        else:
            left_out[label] = (
                "all reported seeds diverged" if results else "only the tuning seed has been run"
            )
    if not rows and not tuned:
        raise UserError(f"{folder} has no loss to report: all trainings diverged")
    return Study(
        rows=rows,
        left_out=left_out,
        mad=_mad_scores(folder / "mad", size),
        settings=settings,
        machine=records[0]["machine"],
        created=max(record["created"] for record in records),
        data=next(
            (found["data_digest"] for record in records if "data_digest" in (found := record["results"])), ""
        ),
        size=size,
        tuning={label: _tuning_losses(runs[label]) for label in sorted(runs, key=_order)} if tuned else {},
    )


def _runs_by_label(records: list[dict[str, Any]]) -> dict[str, Runs]:
    runs: dict[str, Runs] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        training = record["settings"]["recipe"]["training"]
        by_rate = runs[record["settings"]["mixer"]][training["seed"]]
        by_rate[training["learning_rate"]] = record["results"]
    return runs


def _order(label: str) -> tuple[int, str]:
    return (ROWS.index(label) if label in ROWS else len(ROWS), label)


class NotTunedError(Exception):
    """A row of a tuned study whose learning rate cannot be chosen yet."""


def _all_seeds(runs: Runs) -> tuple[float, dict[int, dict[str, Any]]]:
    """Return the learning rate and the results by seed of a row in a study with one rate."""
    ((rate, _),) = next(iter(runs.values())).items()
    return rate, {seed: by_rate[rate] for seed, by_rate in sorted(runs.items())}


def _tuning_seed(runs: Runs) -> int:
    return max(sorted(runs), key=lambda seed: len(runs[seed]))


def _tuning_losses(runs: Runs) -> Losses:
    return {rate: loss_of(result) for rate, result in sorted(runs[_tuning_seed(runs)].items())}


def _reported(label: str, runs: Runs, size: Size | None) -> tuple[float, dict[int, dict[str, Any]]]:
    """Return the learning rate that the tuning seed chooses, and the results of the other seeds at it."""
    tuning, losses = _tuning_seed(runs), _tuning_losses(runs)
    if size is not None:
        losses = considered(size, label, losses)
    if len(losses) <= 1:
        raise NotTunedError("no learning rate has been chosen yet")
    untried = untried_rates(size, label, losses) if size else []
    if untried:
        raise NotTunedError(f"not trained at learning rate {', '.join(f'{rate:g}' for rate in untried)} yet")
    rate = best_rate(losses)
    others = {seed: by_rate for seed, by_rate in sorted(runs.items()) if seed != tuning}
    return rate, {seed: by_rate[rate] for seed, by_rate in others.items() if rate in by_rate}


def _row(label: str, results: dict[int, dict[str, Any]], rate: float | None) -> Row:
    finite = {seed: result for seed, result in results.items() if result["loss"] is not None}
    first = finite[min(finite)]
    return Row(
        label=label,
        losses={seed: result["loss"] for seed, result in finite.items()},
        parameters=first["parameters"],
        forward_flops_per_token=first["forward_flops_per_token"],
        curves={
            seed: [(step, loss) for step, loss in result["curves"]["validation"]]
            for seed, result in finite.items()
        },
        scores=_local_scores(finite),
        rate=rate,
        diverged=len(results) - len(finite),
    )


def _local_scores(results: dict[int, dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the columns of the suite ``local`` that some seed has, by seed."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for seed, result in results.items():
        for column, score in result.get("local", {}).items():
            scores[column][seed] = score["value"]
    return dict(scores)


def _shared_settings(cells: list[dict[str, Any]], folder: Path, tuned: bool) -> dict[str, Any]:
    """Return the settings that all cells share; raise if the cells belong to more than one study."""
    shared = [shared_settings(cell, tuned) for cell in cells]
    for cell, settings in zip(cells, shared, strict=True):
        if settings != shared[0]:
            first, other = _flat(shared[0]), _flat(settings)
            key = min(key for key in first | other if first.get(key) != other.get(key))
            raise UserError(
                f"{folder} has records of more than one study: {key} is {first.get(key)} for "
                f"{cells[0]['mixer']}, {other.get(key)} for {cell['mixer']}; move one to another folder"
            )
    return shared[0]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with keys such as "training.steps"."""
    sections = {name: part if isinstance(part, dict) else {"": part} for name, part in settings.items()}
    return {f"{name}.{key}".rstrip("."): part[key] for name, part in sections.items() for key in part}


def _mad_scores(folder: Path, size: Size | None) -> Scores:
    """Return the MAD scores; at a known size, without tasks of which a row has only some of the cells."""
    found: dict[tuple[str, str], list[tuple[MadCell, dict[str, Any]]]] = defaultdict(list)
    for path in sorted(folder.glob("*/*.json")):
        record = read_record(path, MadCell.kind)
        cell = read_cell(record["settings"])
        found[cell.mixer, cell.task].append((cell, record["results"]))

    def complete(mixer: str, task: str) -> bool:
        if size is None or not size.mad:
            return True
        run = [cell for cell, _ in found[mixer, task]]
        return all(cell in run for cell in cells(mixer, find_grid(size.mad), [task]))

    return summarize(result for key, results in found.items() if complete(*key) for result in results)


def summary(study: Study) -> dict[str, Any]:
    """Return the content of summary.json."""
    rows = {
        label: {
            "loss": row.loss,
            "seeds": list(row.losses.values()),
            "seed_numbers": list(row.losses),
            "parameters": row.parameters,
            "forward_flops_per_token": row.forward_flops_per_token,
            "paper_loss": row.paper_loss,
            "steps_to_thresholds": [steps_to(row.curve, loss) for loss in study.thresholds],
            "mad": study.mad.scores.get(label, {}),
        }
        | ({"learning_rate": row.rate} if study.tuned else {})
        | ({"local": row.scores} if row.scores else {})
        | ({"diverged_seeds": row.diverged} if row.diverged else {})
        for label, row in study.rows.items()
    }
    claims = [
        {
            "claim": verdict.name,
            "verdict": verdict.verdict,
            "measure": verdict.measure,
            "effects": [
                {"name": each.name, **finite_fields(each.effect), "verdict": each.verdict}
                for each in verdict.effects
            ],
            "missing": list(map(pair_name, verdict.missing)),
        }
        for verdict in study.verdicts
    ]
    left_out = {"left_out": study.left_out} if study.left_out else {}
    return {
        "rows": rows,
        "spearman": finite_fields(study.rank_correlation) if study.rank_correlation else None,
        "mad_spearman": {
            column: {"rows": rows, **finite_fields(interval)}
            for column, (rows, interval) in study.mad_correlations.items()
        },
        "thresholds": list(study.thresholds),
        "claims": claims,
        "settings": study.settings,
        "data_digest": study.data,
        **left_out,
    }
