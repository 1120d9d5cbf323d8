"""The study to look at: a Markdown table, a page, and a comparison with somebody else's."""

import math
from dataclasses import dataclass
from pathlib import Path

from hypermlp.errors import UserError
from hypermlp.label import PAPER_ROWS
from hypermlp.layers.registry import BASELINES
from hypermlp.paper.mad import PAPER_COLUMNS
from hypermlp.reporting.charts import Point, Series, interval_chart, line_chart, scatter_chart
from hypermlp.reporting.page import render
from hypermlp.study.claims import MARGIN, SUPPORTED, Verdict
from hypermlp.study.intervals import Interval, spearman
from hypermlp.study.protocol import LOSSES
from hypermlp.study.summary import DIVERGED, ENOUGH, PAPER_LABEL, Row, Study

TEMPLATE = Path(__file__).parent / "study.html"
SHORT = {
    "in-context-recall": "in-context",
    "noisy-in-context-recall": "noisy",
    "fuzzy-in-context-recall": "fuzzy",
    "memorization": "memorize",
    "compression": "compress",
    "selective-copying": "copy",
}


GROUPS = {"S": "softmax", "R": "ReLU", "G": "GLU", "P": "peers"}  # with their colours in page.css
NAMED = {"R-cg-q-12o": "HyperMLP", "G-cg-q-12o": "HyperGLU", "S-p": "S-p"}


@dataclass(frozen=True)
class Comparison:
    """Of two studies, over the rows that both have."""

    labels: list[str]
    ours: list[float]
    theirs: list[float]
    rank_correlation: Interval | None
    same: bool
    """Were data and recipe the same?"""

    @property
    def largest(self) -> float:
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))

    def __str__(self) -> str:
        said = f"{len(self.labels)} rows in common; largest difference of a loss {self.largest:.4f}"
        if self.rank_correlation:
            said += f"; rank correlation {interval(self.rank_correlation)}"
        return said + (
            "" if self.same else "; NOT the same recipe and data, so losses differ for that reason too"
        )


def compare(study: Study, against: Study) -> Comparison:
    labels = [label for label in study.rows if label in against.rows]
    if not labels:
        raise UserError("the two studies have no row in common")
    seeds = {label: study.rows[label].losses.keys() & against.rows[label].losses.keys() for label in labels}
    ours, theirs = (
        [_mean(each.rows[label], seeds[label]) for label in labels] for each in (study, against)
    )  # over common seeds, or all where there are none
    same = study.settings == against.settings and study.data == against.data
    return Comparison(labels, ours, theirs, spearman(ours, theirs) if len(labels) >= ENOUGH else None, same)


def _mean(row: Row, seeds: set[int]) -> float:
    return sum(row.losses[seed] for seed in seeds) / len(seeds) if seeds else row.loss


def interval(found: Interval, digits: int = 2) -> str:
    if not math.isfinite(found.low):
        return f"{found.value:.{digits}f} (one seed, no interval)"
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def group(label: str) -> str:
    """Of one colour: the activation of a label, or a peer."""
    return "P" if label in BASELINES else label[0]


def columns(study: Study) -> list[str]:
    return [task for task in SHORT if any(task in scores for scores in study.mad.scores.values())]


def table_rows(study: Study) -> list[list[str]]:
    """Head and rows, as text; the paper's values in brackets."""
    tasks = columns(study)
    rows = [
        ["label", "parameters", "MFLOPs/token", "seeds", "loss (paper)", *(SHORT[task] for task in tasks)]
    ]
    rows[0] += ["MAD average"] if tasks else []
    for label, row in study.rows.items():
        scores = study.mad.scores.get(label, {})
        paper = PAPER_ROWS.get(PAPER_LABEL.get(label, label))
        name = label + (f" (for {PAPER_LABEL[label]})" if label in PAPER_LABEL else "")
        cells = [
            name,
            f"{row.parameters:,}",
            f"{row.forward_flops_per_token / 1e6:.2f}",
            str(len(row.losses)),
        ]
        cells.append(_both(f"{row.loss:.3f}", None if row.paper_loss is None else f"{row.paper_loss:.3f}"))
        for task in tasks:
            ours = f"{100 * scores[task]:.1f}" if task in scores else ""
            cells.append(_both(ours, f"{getattr(paper, PAPER_COLUMNS[task]):.1f}" if paper else None))
        if tasks:
            average = study.mad.average(label) if label in study.mad.scores else None
            cells.append(
                _both(
                    "" if average is None else f"{100 * average:.1f}",
                    f"{paper.mad_average:.1f}" if paper else None,
                )
            )
        rows.append(cells)
    return rows


def _both(ours: str, paper: str | None) -> str:
    return ours if paper is None else f"{ours} ({paper})".strip()


def markdown(study: Study) -> str:
    head, *rows = table_rows(study)
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join(lines)
    if study.rank_correlation:
        count = sum(label in PAPER_ROWS and label not in DIVERGED for label in study.rows)
        text += f"\n\nRank correlation (Spearman) with the paper's NanoGPT loss over {count} rows: {interval(study.rank_correlation)}."
    text += "\n\n| claim | verdict | pairs: how much lower the second's loss is, 95 % interval |\n| --- | --- | --- |\n"
    return text + "\n".join(f"| {v.claim.name} | {v.verdict} | {_pairs(v)} |" for v in study.verdicts) + "\n"


def _pairs(verdict: Verdict) -> str:
    return "; ".join(f"{pair.worse} → {pair.better}: {interval(pair.effect, 3)}" for pair in verdict.pairs)


def page(study: Study, title: str, comparison: Comparison | None = None) -> str:
    training, data, model = (study.settings[key] for key in ("training", "data", "model"))
    seeds = sorted({len(row.losses) for row in study.rows.values()})
    tasks, scored = columns(study), len(study.mad.scores)
    on_mad = f"; {scored} of them also on {len(tasks)} tasks of MAD" if tasks else ""
    about = (
        f"The same data, in the same order, for each of {len(study.rows)} variants, with {' or '.join(map(str, seeds))} "
        f"seed{'s' * (seeds[-1] > 1)} each{on_mad}. "
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, context {data['context']}, "
        f"{training['steps'] * training['batch_tokens']:,} tokens of {data['source']} as {data['tokenizer']}. "
        f"The loss is that {LOSSES[study.settings['loss']]}. "
        f"{study.machine['processor']}, torch {study.machine['torch']}, {study.created[:10]}."
    )
    return render(
        TEMPLATE,
        title=title,
        about=about,
        study=study,
        supported=sum(verdict.verdict == SUPPORTED for verdict in study.verdicts),
        correlation=interval(study.rank_correlation) if study.rank_correlation else None,
        diverged=sorted(DIVERGED),
        claims=[(verdict, _forest(verdict)) for verdict in study.verdicts],
        scatter=_scatter(study),
        curves=_curves(study),
        table=table_rows(study),
        groups=[
            (name, title)
            for name, title in GROUPS.items()
            if any(group(label) == name for label in study.rows)
        ],
        comparison=comparison,
        against=_against(comparison) if comparison else None,
    )


def _forest(verdict: Verdict) -> str | None:
    rows = [(f"{pair.worse} → {pair.better}", *pair.effect) for pair in verdict.pairs]
    return (
        interval_chart(rows, x="how much lower the second's loss is", band=MARGIN * verdict.claim.equality)
        if rows
        else None
    )


def _scatter(study: Study) -> str | None:
    points = [
        Point(
            row.paper_loss,
            row.loss,
            group(label),
            f"{label}\nours {row.loss:.3f}, paper {row.paper_loss:.3f}",
            NAMED.get(label, ""),
        )
        for label, row in study.rows.items()
        if label in PAPER_ROWS and label not in DIVERGED and row.paper_loss is not None
    ]
    return scatter_chart(points, x="the paper's NanoGPT loss", y="our loss") if points else None


def _curves(study: Study) -> str:
    series = [
        Series(row.curve, group(label), f"{label}\n{row.loss:.3f} at the end\n{row.parameters:,} parameters")
        for label, row in sorted(study.rows.items(), key=lambda item: item[1].loss)
    ]
    return line_chart(series, x="step", y="validation loss")


def _against(comparison: Comparison) -> str:
    points = [
        Point(theirs, ours, group(label), f"{label}\nhere {ours:.4f}, there {theirs:.4f}")
        for label, ours, theirs in zip(comparison.labels, comparison.ours, comparison.theirs, strict=True)
    ]
    return scatter_chart(points, x="loss there", y="loss here")
