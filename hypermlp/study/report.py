"""Reports of a study, in Markdown and as a page, and its comparison with another run."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypermlp.errors import UserError
from hypermlp.jobs.cells import finite_fields
from hypermlp.layers.registry import BASELINES
from hypermlp.reporting.charts import Point, Series, interval_chart, line_chart, scatter_chart
from hypermlp.reporting.page import COLOURS, Card, Figure, Section, report_markdown, report_page
from hypermlp.study.claims import SUPPORTED, Verdict, pair_name
from hypermlp.study.intervals import show_interval, spearman
from hypermlp.study.protocol import LOSSES
from hypermlp.study.reading import ENOUGH, PAPER_DIVERGED, Row, Study
from hypermlp.study.tables import (
    agreement_table,
    claims_table,
    contrast_table,
    convolution_table,
    difference,
    rates_table,
    study_table,
)
from hypermlp.study.thresholds import THRESHOLD_ROW, steps_to

GROUPS = {"softmax": "S", "ReLU": "R", "GLU": "G", "baselines": "P"}  # page.css has a colour for each class
NAMED = {"R-cg-q-12o": "HyperMLP", "G-cg-q-12o": "HyperGLU", "S-p": "S-p"}  # points with a name in the chart
ALL_ROWS, RATES = "All rows", "Learning rates"  # sections with long tables: the last ones of a page


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
    same = study.size.settings == against.size.settings and study.data == against.data
    return Comparison(labels, ours, theirs, same)


def _mean(row: Row, seeds: set[int]) -> float:
    """Return the mean loss over the given seeds; over all seeds of the row if none is given."""
    return sum(row.losses[seed] for seed in seeds) / len(seeds) if seeds else row.loss


def missing(study: Study) -> list[str]:
    """Return what the study should have and does not have yet, in sentences."""
    size, reasons = study.size, defaultdict(list)
    for label, reason in study.left_out.items():
        reasons[reason].append(label)
    found = [f"No loss for {', '.join(labels)}: {reason}." for reason, labels in reasons.items()]
    not_run = [label for label, row in study.all_rows.items() if not row.records]
    if not_run:
        found.append(f"No language model was trained for {', '.join(not_run)}.")
    for label, row in study.rows.items():
        seeds = [str(seed) for seed in size.reported_seeds(label) if seed not in row.losses]
        if seeds and label in size.rows:
            diverged = f" ({row.diverged} diverged)" if row.diverged else ""
            found.append(f"{label} lacks seed {', '.join(seeds)}{diverged}.")
    some = [row for row in size.rows if not {*size.tasks} <= study.mad.scores.get(row, {}).keys()]
    if some:
        found.append(f"MAD is not complete for {len(some)} of {len(size.rows)} rows: {', '.join(some)}.")
    return found


def markdown(study: Study) -> str:
    """Return the report of a study in Markdown."""
    return report_markdown(_sections(study))


def page(study: Study, title: str, comparison: Comparison | None = None) -> str:
    """Return the report of a study as a web page."""
    sections = [*_sections(study), *([_against(comparison)] if comparison else [])]
    supported = sum(verdict.verdict == SUPPORTED for verdict in study.verdicts)
    numbers = {"variants": f"{len(study.rows)}"}
    if study.verdicts:
        numbers["claims supported"] = f"{supported} of {len(study.verdicts)}"
    if study.rank_correlation:
        correlation = show_interval(study.rank_correlation, digits=2)
        numbers["rank correlation with the paper's losses"] = correlation
    sections.sort(key=lambda section: section.title in (ALL_ROWS, RATES))
    return report_page(title, sections, _about(study), numbers)


def _about(study: Study) -> str:
    training, data, model = (study.size.settings[key] for key in ("training", "data", "model"))
    counts = sorted({len(row.losses) for row in study.rows.values()})
    seeds = f", {' or '.join(map(str, counts))} {'seed' if counts == [1] else 'seeds'} each" if counts else ""
    on_mad = f"; {len(study.mad.scores)} of them also on {len(study.size.tasks)} tasks of MAD"
    match, newest = model.get("match_parameters"), study.newest
    parts = [
        "" if study.size.reference else "A rerun of the paper's controlled design study. ",
        f"{len(study.rows)} variants, with the same data in the same order{seeds}",
        f"{on_mad if study.mad.scores else ''}. ",
        "Each variant has its own learning rate, chosen with a seed that is not reported. "
        if study.size.rates and study.size.tuning_seed not in study.size.seeds
        else "",
        f"The width of the MLP makes all parameter counts equal to that of {match}. " if match else "",
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, context {data['context']}, "
        f"{training['steps'] * training['batch_tokens']:,} tokens of {data['source']}, tokenizer "
        f"{data['tokenizer']}. The loss is {LOSSES[study.size.loss]}. "
        f"{newest['machine']['processor']}, torch {newest['machine']['torch']}, {newest['created'][:10]}",
        f", commit {newest['commit']}." if newest.get("commit") else ".",
    ]
    return "".join(parts)


def _sections(study: Study) -> list[Section]:
    """Return the parts of a report that the study has something for."""
    found = [
        Section("Missing", items=missing(study)),
        Section(
            ALL_ROWS,
            "Our values, with the paper's in brackets. FLOPs are those of a forward pass, counting only "
            "pairs of positions that see each other. The steps are those until the validation loss, "
            f"interpolated between evaluations, has fallen to the loss of {THRESHOLD_ROW} after 40, 60, 80 "
            "and 100 % of its steps; the paper's are those to its own losses.",
            table=study_table(study),
        ),
        _contrast(study),
        Section(
            "HyperGLU, or softmax attention with the same convolutions?",
            "Softmax attention with RoPE and HyperGLU with equal convolutions: means and differences over "
            "the seeds that both have, with 95 % intervals. A positive difference means that HyperGLU is "
            "better.",
            table=convolution_table(study),
        ),
        Section(
            RATES,
            "Loss of the tuning seed at each learning rate. The rate in bold was chosen.",
            table=rates_table(study),
        ),
        _prediction(study),
        Section(
            "Does MAD rank the rows as in the paper?",
            "Spearman's rank correlation of our scores with the paper's over its rows, with an interval from "
            "a bootstrap over rows.",
            table=agreement_table(study),
        ),
        Section(
            "The paper's claims",
            "Each dot shows how much lower the loss of the second row is than the loss of the first, with "
            "its 95 % interval over seeds. The variance is estimated from all pairs together. In the shaded "
            "band, two rows count as equally good. A claim is supported if all its intervals lie on its "
            "side, refuted if one lies on the other side, and undecided otherwise.",
            cards=[_card(verdict) for verdict in study.verdicts],
            table=claims_table(study),
        ),
        *(
            Section(
                note=f"{verdict.name}: gains in percentage points, with the paper's own in brackets.",
                table=verdict.details,
            )
            for verdict in study.verdicts
        ),
        _curves(study),
        Section("Not used", items=_unlisted(study)),
    ]
    return [each for each in found if each.items or each.text or each.figures or each.cards or each.table]


def _unlisted(study: Study) -> list[str]:
    """Return a sentence about the records that are no cells of the size."""
    count, names = len(study.unlisted), ", ".join(study.unlisted)
    return [f"{count} records, because the size has no such cells: {names}."] if count else []


def _contrast(study: Study) -> Section:
    reference = study.size.reference
    if not reference:
        return Section()
    found = {label: difference(study, label) for label in study.labels if label != reference}
    rows = [(label, *effect) for label, effect in found.items() if effect]
    chart = interval_chart(rows, x=f"loss minus the loss of {reference}") if rows else ""
    return Section(
        f"Comparison with {reference}",
        f"Means over the seeds and differences from {reference}, paired by seed, with 95 % intervals "
        f"(Student's t). A positive difference in loss means that {reference} is better.",
        figures=[Figure(chart)] if chart else (),
        table=contrast_table(study),
    )


def _card(verdict: Verdict) -> Card:
    rows = [(each.name, *each.effect) for each in verdict.effects]
    chart = interval_chart(rows, x=verdict.measure, band=verdict.margin) if rows else ""
    notes = ["" if rows else "None of its pairs of rows has been run."]
    notes += [f"Missing: {', '.join(map(pair_name, verdict.missing))}."] if verdict.missing else []
    return Card(verdict.name, verdict.verdict, verdict.statement, chart, " ".join(notes).strip())


def group(label: str) -> str:
    """Return the class of GROUPS that a row belongs to: the activation of a label, or "P" for a baseline."""
    return "P" if label in BASELINES else label[0]


def _groups(labels: Iterable[str]) -> dict[str, str]:
    present = set(map(group, labels))
    return {name: kind for name, kind in GROUPS.items() if kind in present}


def _prediction(study: Study) -> Section:
    """Return our losses against the paper's, with their rank correlation."""
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
    if not points:
        return Section()
    text = ""
    if study.rank_correlation:
        over = f"with the paper's NanoGPT loss over {len(study.comparable)} rows"
        text = f"Rank correlation (Spearman) {over}: {show_interval(study.rank_correlation, digits=2)}."
    caption = (
        "Our loss against the paper's for each label; the interval of the rank correlation is from a "
        f"bootstrap over rows. Not shown: {', '.join(sorted(PAPER_DIVERGED))}, whose loss in the paper is a "
        "late divergence. Hollow points are far away and drawn at the edge."
    )
    chart = scatter_chart(points, x="the paper's NanoGPT loss", y="our loss")
    figure = Figure(chart, caption, _groups(study.rows))
    return Section("Does a small run predict the large one?", text=text, figures=[figure])


def _curves(study: Study) -> Section:
    """Return the learning curves: a colour for each row if they are few, else one for each group."""
    few = len(study.rows) <= COLOURS
    colours = {label: f"c{index}" if few else group(label) for index, label in enumerate(study.rows)}
    series = [
        Series(
            row.curve, colours[label], f"{label}\n{row.loss:.3f} at the end\n{row.parameters:,} parameters"
        )
        for label, row in sorted(study.rows.items(), key=lambda item: item[1].loss)
    ]
    if not series:
        return Section()
    caption = (
        "Validation loss, the mean over the seeds. Point at a curve for details, or step through the curves "
        "with the Tab key."
    )
    chart = line_chart(series, x="step", y="validation loss")
    return Section("Loss curves", figures=[Figure(chart, caption, colours if few else _groups(study.rows))])


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
        | ({"learning_rate": row.rate} if study.size.rates else {})
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
        "settings": study.size.settings,
        "data_digest": study.data,
        **left_out,
    }


def _against(comparison: Comparison) -> Section:
    points = [
        Point(theirs, ours, group(label), f"{label}\nhere {ours:.4f}, there {theirs:.4f}")
        for label, ours, theirs in zip(comparison.labels, comparison.ours, comparison.theirs, strict=True)
    ]
    chart = scatter_chart(points, x="loss there", y="loss here")
    figure = Figure(chart, key=_groups(comparison.labels))
    return Section("Comparison with another run", text=f"{comparison}.", figures=[figure])
