"""Reports of a study: Markdown tables, a page, and a comparison with another run."""

from dataclasses import dataclass
from pathlib import Path

from hypermlp.errors import UserError
from hypermlp.layers.registry import BASELINES
from hypermlp.reporting.charts import Point, Series, interval_chart, line_chart, scatter_chart
from hypermlp.reporting.page import render
from hypermlp.reporting.table import Table
from hypermlp.study.claims import SUPPORTED, Verdict, pair_name
from hypermlp.study.contrast import LOSS, contrast_table, contrasts, convolution_table
from hypermlp.study.intervals import show_interval, spearman
from hypermlp.study.missing import missing
from hypermlp.study.protocol import LOSSES
from hypermlp.study.summary import ENOUGH, PAPER_DIVERGED, Row, Study
from hypermlp.study.tables import agreement_table, mad_tasks, rates_table, study_table
from hypermlp.study.thresholds import THRESHOLD_ROW

TEMPLATE = Path(__file__).parent / "study.html"
GROUPS = {"S": "softmax", "R": "ReLU", "G": "GLU", "P": "baselines"}  # page.css has a colour for each key
NAMED = {"R-cg-q-12o": "HyperMLP", "G-cg-q-12o": "HyperGLU", "S-p": "S-p"}  # points with a name in the chart
FEW = 8  # rows that have a colour each; page.css has so many
EFFECTS = "effect, 95 % interval"


@dataclass(frozen=True)
class Comparison:
    """The losses of two studies, for the rows that both have."""

    labels: list[str]
    ours: list[float]
    theirs: list[float]
    same: bool
    """Whether both studies have the same data and recipe."""

    @property
    def largest(self) -> float:
        """The largest difference between two losses."""
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))

    def __str__(self) -> str:
        parts = [f"{len(self.labels)} rows in common", f"largest difference of a loss {self.largest:.4f}"]
        if len(self.labels) >= ENOUGH:
            parts.append(f"rank correlation {show_interval(spearman(self.ours, self.theirs), digits=2)}")
        if not self.same:
            parts.append("NOT the same recipe and data, which also makes losses differ")
        return "; ".join(parts)


def compare(study: Study, against: Study) -> Comparison:
    """Compare two studies on the rows and seeds that both have."""
    labels = [label for label in study.rows if label in against.rows]
    if not labels:
        raise UserError("the two studies have no row in common")
    seeds = {label: study.rows[label].losses.keys() & against.rows[label].losses.keys() for label in labels}
    ours, theirs = ([_mean(each.rows[label], seeds[label]) for label in labels] for each in (study, against))
    same = study.settings == against.settings and study.data == against.data
    return Comparison(labels, ours, theirs, same)


def _mean(row: Row, seeds: set[int]) -> float:
    """Return the mean loss over the given seeds; over all seeds of the row if none is given."""
    return sum(row.losses[seed] for seed in seeds) / len(seeds) if seeds else row.loss


def group(label: str) -> str:
    """Return the key of GROUPS that a row belongs to: the activation of a label, or "P" for a baseline."""
    return "P" if label in BASELINES else label[0]


def claims_table(study: Study) -> Table:
    """Return a line for each claim, with its verdict and its effects."""
    lines = [[verdict.name, verdict.verdict, _effects(verdict)] for verdict in study.verdicts]
    return Table(["claim", "verdict", EFFECTS], lines, left=frozenset(["verdict", EFFECTS]))


def _effects(verdict: Verdict) -> str:
    found = [f"{each.name}: {show_interval(each.effect)}" for each in verdict.effects]
    missing = ", ".join(map(pair_name, verdict.missing))
    return "; ".join([*found, f"missing: {missing}"] if missing else found)


def markdown(study: Study) -> str:
    """Return the report of a study in Markdown."""
    parts = [study_table(study).markdown()]
    if study.reference:
        parts.append(contrast_table(study, study.reference).markdown())
    if convolutions := convolution_table(study):
        parts.append(convolutions.markdown())
    if study.tuning:
        parts.append(rates_table(study).markdown())
    if left := missing(study):
        parts.append("\n".join(["Missing:", "", *(f"- {sentence}" for sentence in left)]))
    if study.rank_correlation:
        over = f"with the paper's NanoGPT loss over {len(study.comparable)} rows"
        parts.append(
            f"Rank correlation (Spearman) {over}: {show_interval(study.rank_correlation, digits=2)}."
        )
    if study.mad_correlations:
        parts.append(agreement_table(study).markdown())
    if study.verdicts:
        parts.append(claims_table(study).markdown())
        parts += [details.markdown() for verdict in study.verdicts if (details := verdict.details)]
    return "\n\n".join(parts) + "\n"


def page(study: Study, title: str, comparison: Comparison | None = None) -> str:
    """Return the report of a study as a web page."""
    present = {group(label) for label in study.rows}
    return render(
        TEMPLATE,
        title=title,
        about=_about(study),
        study=study,
        supported=sum(verdict.verdict == SUPPORTED for verdict in study.verdicts),
        correlation=show_interval(study.rank_correlation, digits=2) if study.rank_correlation else None,
        diverged=sorted(PAPER_DIVERGED),
        claims=[(verdict, _forest(verdict)) for verdict in study.verdicts],
        scatter=_scatter(study),
        curves=_curves(study),
        curve_key=_curve_groups(study),
        reference=study.reference,
        contrast=contrast_table(study, study.reference) if study.reference else None,
        differences=_differences(study),
        convolutions=convolution_table(study),
        rates=rates_table(study) if study.tuning else None,
        missing=missing(study),
        table=study_table(study),
        agreement=agreement_table(study) if study.mad_correlations else None,
        threshold_row=THRESHOLD_ROW,
        groups=[(name, title) for name, title in GROUPS.items() if name in present],
        comparison=comparison,
        against=_against(comparison) if comparison else None,
    )


def _about(study: Study) -> str:
    training, data, model = (study.settings[key] for key in ("training", "data", "model"))
    counts = sorted({len(row.losses) for row in study.rows.values()})
    seeds = f", {' or '.join(map(str, counts))} {'seed' if counts == [1] else 'seeds'} each" if counts else ""
    tasks = mad_tasks(study) if study.mad.scores else []
    on_mad = f"; {len(study.mad.scores)} of them also on {len(tasks)} tasks of MAD" if tasks else ""
    rates = (
        "Each variant has its own learning rate, chosen with a seed that is not reported. "
        if study.tuned
        else ""
    )
    match = model.get("match_parameters")
    equal = f"The width of the MLP makes all parameter counts equal to that of {match}. " if match else ""
    return (
        f"{len(study.rows)} variants, with the same data in the same order{seeds}{on_mad}. {rates}{equal}"
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, context {data['context']}, "
        f"{training['steps'] * training['batch_tokens']:,} tokens of {data['source']}, tokenizer "
        f"{data['tokenizer']}. The loss is {LOSSES[study.settings['loss']]}. "
        f"{study.machine['processor']}, torch {study.machine['torch']}, {study.created[:10]}."
    )


def _differences(study: Study) -> str | None:
    """Return a chart of the differences from the reference row."""
    found = contrasts(study, study.reference) if study.reference else []
    rows = [(each.label, *each.differences[LOSS]) for each in found if LOSS in each.differences]
    return interval_chart(rows, x=f"loss minus the loss of {study.reference}") if rows else None


def _forest(verdict: Verdict) -> str | None:
    rows = [(each.name, *each.effect) for each in verdict.effects]
    return interval_chart(rows, x=verdict.measure, band=verdict.margin) if rows else None


def _scatter(study: Study) -> str | None:
    points = [
        Point(
            row.paper_loss,
            row.loss,
            group(row.label),
            f"{row.label}\nours {row.loss:.3f}, paper {row.paper_loss:.3f}",
            NAMED.get(row.label, ""),
        )
        for row in map(study.rows.__getitem__, study.comparable)
        if row.paper_loss is not None
    ]
    return scatter_chart(points, x="the paper's NanoGPT loss", y="our loss") if points else None


def _curve_groups(study: Study) -> dict[str, str]:
    """Return the colour of each row's curve: one for each row if they are few, else one for each group."""
    few = len(study.rows) <= FEW
    return {label: f"c{index}" if few else group(label) for index, label in enumerate(study.rows)}


def _curves(study: Study) -> str | None:
    colours = _curve_groups(study)
    series = [
        Series(
            row.curve, colours[label], f"{label}\n{row.loss:.3f} at the end\n{row.parameters:,} parameters"
        )
        for label, row in sorted(study.rows.items(), key=lambda item: item[1].loss)
    ]
    return line_chart(series, x="step", y="validation loss") if series else None


def _against(comparison: Comparison) -> str:
    points = [
        Point(theirs, ours, group(label), f"{label}\nhere {ours:.4f}, there {theirs:.4f}")
        for label, ours, theirs in zip(comparison.labels, comparison.ours, comparison.theirs, strict=True)
    ]
    return scatter_chart(points, x="loss there", y="loss here")
