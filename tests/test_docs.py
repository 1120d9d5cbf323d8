"""Every table in the documents equals the table of its record."""

import json
import re
from pathlib import Path

import pytest

from hypermlp.bench import efficiency, lm, op, window
from hypermlp.cli import main
from hypermlp.evals.positions import KIND, position_table
from hypermlp.evals.recall import SUITE, recall_table
from hypermlp.evals.table import score_table
from hypermlp.jobs.cells import recorded
from hypermlp.layers.registry import BASELINES, chosen_mixers
from hypermlp.mad.protocol import cells, find_grid, grid_of, read_cell
from hypermlp.mad.report import published_value, summarize
from hypermlp.mad.tasks import TASKS
from hypermlp.reporting.records import read_record
from hypermlp.study import report
from hypermlp.study.claims import CLAIMED
from hypermlp.study.protocol import find_size, tuning_cells
from hypermlp.study.summary import read_study, summary
from hypermlp.study.tuning import tuning_table
from hypermlp.train.recipe import load_recipe

ROOT = Path(__file__).parents[1]
NOT_MEASURED = {"fox"}  # newer than the records of `hypermlp bench`; docs/baselines.md says so


@pytest.mark.parametrize(
    ("document", "record"),
    [("README.md", "bench-op.json"), ("docs/performance.md", "bench-op-sweep.json")],
    ids=str,
)
def test_benchmark_tables(document, record):
    rows = read_record(ROOT / "docs" / "results" / record, "bench-op")["results"]
    assert op.table(rows).markdown() in (ROOT / document).read_text(), (
        f"{document} does not show docs/results/{record}; paste its table"
    )


@pytest.mark.parametrize("record", ["bench-lm.json", "bench-lm-stream.json"])
def test_training_tables(record):
    rows = read_record(ROOT / "docs" / "results" / record, "bench-lm")["results"]
    assert lm.throughput_table(rows).markdown() in (ROOT / "docs" / "performance.md").read_text(), (
        f"docs/performance.md does not show docs/results/{record}"
    )


def test_tables_of_long_contexts():
    folder, text = ROOT / "docs" / "results" / "long-context", (ROOT / "docs" / "long-context.md").read_text()
    recalled = read_record(folder / "recall-length.json", SUITE)["results"]
    assert recall_table(recalled).markdown() in text, "docs/long-context.md does not show recall-length.json"
    windows = read_record(folder / "bench-window.json", "bench-window")["results"]
    assert window.table(windows).markdown() in text, "docs/long-context.md does not show bench-window.json"
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    rows = [row for record in records if record["kind"] == KIND for row in record["results"]]
    assert len(rows) >= 20
    for line in position_table(rows, 128).markdown().splitlines():
        assert line in text, f"docs/long-context.md does not show {line}"


def test_mad_tables():
    labels = ["S", "S-p", "R-cg-q", "R-cg-q-12o", "G-cg-q-12o", "R-12!", "R-12o!"]
    wanted = [cell for label in labels for cell in cells(label, find_grid("mini"), list(TASKS))]
    results = [(cell, recorded(ROOT / "docs" / "results" / "study-mini" / "mad", cell)) for cell in wanted]
    assert str(summarize(results)) in (ROOT / "docs" / "mad.md").read_text(), (
        "docs/mad.md does not show docs/results/study-mini/mad"
    )


def test_learning_rates_of_rows_that_no_claim_uses():
    results = [
        (cell, recorded(ROOT / "docs" / "results" / "study-tune", cell))
        for cell in tuning_cells(find_size("mini"))
    ]
    table = tuning_table(results).markdown()
    assert table in (ROOT / "docs" / "study.md").read_text(), (
        "docs/study.md does not show docs/results/study-tune"
    )


def test_two_rows_at_every_learning_rate():
    wanted = tuning_cells(find_size("mini"), ["S-p", "G-cg-q-12o"])
    results = [(cell, recorded(ROOT / "docs" / "results" / "study-rates", cell)) for cell in wanted]
    table = tuning_table(results).markdown()
    assert table in (ROOT / "docs" / "study.md").read_text(), (
        "docs/study.md does not show docs/results/study-rates"
    )


def test_the_study():
    folder = ROOT / "docs" / "results" / "study-mini"
    study = read_study(folder)
    assert len(study.rows) == 35
    assert all(len(study.rows[label].losses) >= 2 for label in CLAIMED)
    again = {name: summary(study)[name] for name in ("rows", "spearman", "claims")}
    assert again == {name: json.loads((folder / "summary.json").read_text())[name] for name in again}
    table = report.markdown(study)
    assert table == (folder / "table.md").read_text()
    below = table[table.index("Rank correlation") :].strip()
    assert below in (ROOT / "docs" / "study.md").read_text(), (
        "docs/study.md does not show docs/results/study-mini"
    )
    low, value, high = (f"{summary(study)['spearman'][name]:.2f}" for name in ("low", "value", "high"))
    assert f"Spearman {value}, 95 % interval {low} to {high}, 32 rows" in (ROOT / "README.md").read_text()


def test_the_learning_rates_of_cpu_mini_are_the_tuned_ones():
    """Rates that the size ``headline`` has chosen; rows that are still being tuned are skipped."""
    for label, row in read_study(ROOT / "docs" / "results" / "headline").rows.items():
        rate = load_recipe("cpu-mini", [f"model.mixer={label}"]).training.learning_rate
        assert rate == row.rate, (
            f"docs/results/headline has chosen {row.rate:g} for {label}: put it into recipes/cpu-mini.yaml"
        )


@pytest.mark.parametrize("recipe", ["lm-340m", "lm-1.3b"])
@pytest.mark.thorough
def test_what_the_large_runs_need(recipe, capsys):
    assert main(["plan", recipe, "--count", "8"]) == 0
    _, needs = capsys.readouterr().out.strip().split("\n", 1)
    assert needs in (ROOT / "docs" / "train.md").read_text(), (
        f"docs/train.md does not show `hypermlp plan {recipe} --count 8`"
    )


def test_costs_of_baselines():
    rows = read_record(ROOT / "docs" / "results" / "bench-mixers.json")["results"]
    text = (ROOT / "docs" / "baselines.md").read_text()
    assert lm.cost_table(rows).markdown() in text
    times = {row["mixer"]: row["layer_ms"] for row in rows}
    for name in BASELINES.keys() - NOT_MEASURED - {"softmax", "softmax-naive"}:
        ratio = times[name] / times["softmax"]
        assert f"{name} {ratio:.2f}" in text[text.index("One layer alone") :], (
            f"{name} is {ratio:.2f} times softmax"
        )


def test_two_small_models_evaluated():
    rows = read_record(ROOT / "docs" / "results" / "eval-local.json", "eval")["results"]
    assert score_table(rows).markdown() in (ROOT / "docs" / "evaluation.md").read_text()


def test_the_efficiency_table():
    rows = read_record(ROOT / "docs" / "results" / "bench-table.json", "bench-table")["results"]
    assert [row["mixer"] for row in rows] == [
        mixer for mixer in chosen_mixers(["all"]) if mixer not in NOT_MEASURED
    ]
    assert efficiency.table(rows).markdown() in (ROOT / "docs" / "performance.md").read_text()


def test_recall_of_baselines():
    results = {}
    for path in (ROOT / "docs" / "results" / "mad-peers").rglob("*.json"):
        record = read_record(path, "mad")
        assert grid_of(read_cell(record["settings"])) == "mini"
        results[record["settings"]["mixer"]] = record["results"]
    assert set(results) == set(chosen_mixers(["all"]))
    text = (ROOT / "docs" / "baselines.md").read_text()
    for mixer, found in results.items():
        published = published_value(mixer, "in-context-recall")
        shown = "" if published is None else f"{published:.1f}"
        assert (
            f"| {mixer} | {found['score']:.1%} | {found['steps']:,} | {found['parameters']:,} | {shown} |"
            in text
        )


def test_recall_to_the_end():
    """docs/mad.md: how many steps in-context recall takes."""
    results = {}
    for path in (ROOT / "docs" / "results" / "mad-recall").rglob("*.json"):
        record = read_record(path)
        results[record["settings"]["mixer"]] = record["results"]
    needed = results["S-p"]["steps"]
    at_that_time = next(macro for step, _, macro, _ in results["S"]["curve"] if step == needed)
    text = (ROOT / "docs" / "mad.md").read_text()
    for row in (
        f"| G-cg-q-12o | {results['G-cg-q-12o']['macro']:.1%} | {results['G-cg-q-12o']['steps']:,} |",
        f"| S-p | {results['S-p']['macro']:.1%} | {needed:,} |",
        f"| S | {at_that_time:.1%} | {needed:,} |",
        f"| S | {results['S']['curve'][-1][2]:.1%} | {results['S']['steps']:,} |",
    ):
        assert row in text, f"docs/mad.md does not have {row}"
    assert 2 * results["G-cg-q-12o"]["steps"] <= needed
    assert at_that_time < 0.6


def test_the_two_comparisons_on_recall_name_each_other():
    """The demo and the benchmark begin with other embeddings, so softmax needs other numbers of steps."""
    for name in ("README.md", "docs/mad.md"):
        text = (ROOT / name).read_text()
        assert re.search(r"\b150\b", text)
        assert "2,250" in text
