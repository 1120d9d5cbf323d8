"""Every table in the documents equals the table of its record."""

import json
import re
import runpy
import tomllib
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
from hypermlp.study import report, scale, scale_report
from hypermlp.study.protocol import CANON, find_size
from hypermlp.study.reading import read_study
from hypermlp.study.report import summary
from hypermlp.study.tables import contrast_table, convolution_table, difference, rates_table
from hypermlp.train.keys import key_table
from hypermlp.train.recipe import load_recipe

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "record",
    ["bench-op.json", "bench-op-sweep.json"],
)
def test_benchmark_tables(record):
    rows = read_record(ROOT / "docs" / "results" / record, "bench-op")["results"]
    assert op.table(rows).markdown() in (ROOT / "docs" / "performance.md").read_text(), (
        f"docs/performance.md does not show docs/results/{record}; paste its table"
    )


def test_the_headline_comparison():
    """Its table is in docs/study.md, and README has the differences of all rows, losing ones too."""
    study = read_study(ROOT / "docs" / "results" / "headline")
    text = (ROOT / "docs" / "study.md").read_text()
    for table in (contrast_table(study), convolution_table(study), rates_table(study)):
        assert table.markdown() in text, "docs/study.md does not show docs/results/headline"
    counts = {label: len(row.losses) for label, row in study.rows.items()}
    size = find_size("mixing")
    assert counts == {label: len(size.reported_seeds(label)) for label in size.rows}
    text = (ROOT / "README.md").read_text()
    for label in ("S-p", "S-pc", "S-p+canon"):
        mean, low, high = difference(study, label)
        assert f"{mean:.3f}" in text
        assert f"{low:+.3f} to {high:+.3f}" in text
    for label in ("S-pc", "R-cg-q-12o", "S-p+canon", "G-g-q-12o+canon"):
        assert f"reaches {study.rows[label].loss:.3f}" in text


def test_results_in_the_readme():
    """Every row of the README's table with a record has the record's numbers, and says who loses."""
    results = ROOT / "docs" / "results"

    def timed(record, what, **sizes):
        (row,) = (
            row
            for row in read_record(results / record, "bench-op")["results"]
            if row["what"] == what and row["backend"] == "native" and sizes.items() <= row.items()
        )
        return row["ours_ms"], min(row["softmax_ms"].values()), row["ours_mib"], row["softmax_mib"]

    labels = ("G-cg-q-12o", "S-p")
    wanted = [cell for label in labels for cell in cells(label, find_grid("mini"), list(TASKS))]
    mad = summarize([(cell, recorded(results / "study-mini" / "mad", cell)) for cell in wanted])
    train = timed("bench-op.json", "layer forward+backward")
    narrow = timed("bench-op-sweep.json", "layer forward+backward", hidden=128, batch=32)
    decode = timed("bench-op.json", "layer decode one token")
    scores = read_record(results / "eval-local.json", "eval")["results"]
    bits = [f"{row['scores']['bits per byte']['value']:.3f}" for row in scores]
    study = read_study(results / "headline")
    losses = [f"{study.rows[label].loss:.3f}" for label in labels]
    rows = {
        "the same with two vocabularies raised to separate the labels": [
            f"{100 * mad.average(x):.1f}" for x in labels
        ],
        "MAD compression, short runs, accuracy": [
            f"{100 * mad.scores[x]['compression']:.1f}" for x in labels
        ],
        "language model, 1.06M parameters, loss in nats per byte, five seeds, tuned rates": losses,
        "language model, low learning rate, 1.06M against 0.82M parameters, bits per byte": bits,
        "layer, forward and backward, width 768, 1024 positions": [f"{value:.0f} ms" for value in train[:2]],
        "layer, one token of decoding, width 768, 1024 positions": [
            f"{value:.2f} ms" for value in decode[:2]
        ],
        "layer, forward and backward, width 128, batches of 32 x 128": [
            f"{value:.1f} ms" for value in narrow[:2]
        ],
        "memory of the layer, forward and backward, width 768": [f"{value:.1f} MiB" for value in train[2:]],
    }
    higher_is_better = {name for name in rows if name.startswith(("MAD", "the same"))}
    text = (ROOT / "README.md").read_text()
    for name, (first, second) in rows.items():
        loses = (float(first.split()[0]) > float(second.split()[0])) != (name in higher_is_better)
        row = f"| {'**loses:** ' if loses else ''}{name} | {first} | {second} |"
        assert row in text, f"README.md does not have {row}"


def test_uv_takes_the_tested_pytorch():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(settings["constraint-dependencies"]) <= set(pinned)


def test_the_readme_is_short_and_its_picture_is_drawn_from_the_records(tmp_path):
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    script = runpy.run_path(str(ROOT / "docs" / "figures" / "overview.py"))
    script["draw"]().savefig(tmp_path / "again.png", dpi=130)
    assert (tmp_path / "again.png").stat().st_size > 10_000
    assert (ROOT / "docs" / "figures" / "overview.png").exists()


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
    labels = ["S", "S-p", "S-c", "S-pc", "R-cg-q", "R-cg-q-12o", "G-cg-q-12o", "R-12!", "R-12o!"]
    wanted = [cell for label in labels for cell in cells(label, find_grid("mini"), list(TASKS))]
    results = [(cell, recorded(ROOT / "docs" / "results" / "study-mini" / "mad", cell)) for cell in wanted]
    assert str(summarize(results)) in (ROOT / "docs" / "mad.md").read_text(), (
        "docs/mad.md does not show docs/results/study-mini/mad"
    )


def test_mad_with_the_vocabularies_of_the_benchmark():
    """docs/mad.md: the grid ``mini`` has larger ones in two tasks, so these two were trained again."""
    folder = ROOT / "docs" / "results"
    records = [read_record(path) for path in sorted((folder / "mad-vocabulary").rglob("*.json"))]
    own = summarize([(read_cell(record["settings"]), record["results"]) for record in records]).scores
    changed = ["noisy-in-context-recall", "memorization"]
    others = [task for task in TASKS if task not in changed]
    text = (ROOT / "docs" / "mad.md").read_text()
    assert len(own) == 7
    shown = {}
    for label, scores in own.items():
        wanted = [cell for task in others for cell in cells(label, find_grid("mini"), [task])]
        rest = summarize([(cell, recorded(folder / "study-mini" / "mad", cell)) for cell in wanted])
        average = (sum(rest.scores[label].values()) + sum(scores.values())) / len(TASKS)
        values = [*(scores[task] for task in changed), average]
        line = f"| {label} | {' | '.join(f'{100 * value:.1f}' for value in values)} |"
        assert line in text, f"docs/mad.md does not have {line}"
        shown[label] = values[-1]
    row = "MAD, six tasks, short runs, average accuracy, the benchmark's own vocabularies"
    ours, softmax = (f"{100 * shown[label]:.1f}" for label in ("G-cg-q-12o", "S-p"))
    assert f"| {row} | {ours} | {softmax} |" in (ROOT / "README.md").read_text()


def test_the_study():
    folder = ROOT / "docs" / "results" / "study-mini"
    study = read_study(folder)
    size = find_size("mini")
    assert {label: tuple(row.losses) for label, row in study.rows.items()} == {
        label: size.reported_seeds(label) for label in size.rows
    }
    edges = [row.rate for row in study.rows.values() if row.rate in (min(size.rates), max(size.rates))]
    text = (ROOT / "docs" / "study.md").read_text()
    counts = f"{len(edges)} of the 35 rows it lies\n  at the edge of the grid"
    assert f"For {counts} ({edges.count(4e-3)} at 4e-3, {edges.count(1.6e-2)} at 1.6e-2)" in text
    again = {name: summary(study)[name] for name in ("rows", "spearman", "mad_spearman", "claims")}
    assert again == {name: json.loads((folder / "summary.json").read_text())[name] for name in again}
    table = report.markdown(study)
    assert table == (folder / "table.md").read_text()
    below = table[table.index("Rank correlation") : table.index("Not used")].strip()
    assert below in text, "docs/study.md does not show docs/results/study-mini"
    averages = {label: 100 * study.mad.average(label) for label in size.rows}
    prose = " ".join(text.split())
    for label in sorted(averages, key=averages.__getitem__)[-7:]:  # the ranking that the text names
        shown = "HyperGLU" if label == "G-cg-q-12o" else f"`{label}`"
        assert re.search(rf"{re.escape(shown)} [^.;]*\({averages[label]:.1f}\)", prose), label
    low, value, high = (f"{summary(study)['spearman'][name]:.2f}" for name in ("low", "value", "high"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Spearman {value}, 95 % interval {low} to {high}, 32 rows" in readme


def test_loss_against_size():
    folder = ROOT / "docs" / "results" / "scale"
    points = scale.find_points("full", [])
    found = scale.read_scale(points, folder, ROOT / "docs" / "results" / "headline")
    assert [len(study.rows) for study in found.values()] == [3, 3, 3]
    table = scale_report.markdown(found).strip()
    assert table == (folder / "table.md").read_text().strip()
    assert table in (ROOT / "docs" / "study.md").read_text(), "docs/study.md does not show docs/results/scale"


def test_the_learning_rates_of_cpu_mini_are_the_tuned_ones():
    """Rates that the size ``headline`` has chosen; rows that are still being tuned are skipped.

    A rate belongs to a mixer, so rows with Canon layers, which are a setting of the block, have none.
    """
    rows = read_study(ROOT / "docs" / "results" / "headline").rows
    for label, row in rows.items():
        if label.endswith(CANON):
            continue
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


def test_the_keys_of_a_recipe():
    table = key_table()
    assert table.markdown() in (ROOT / "docs" / "train.md").read_text(), "paste the table of key_table()"


def test_the_goals_of_the_kernels():
    rows = read_record(ROOT / "docs" / "results" / "bench-goals.json", "bench-goals")["results"]
    assert op.goal_table(rows).markdown() in (ROOT / "docs" / "performance.md").read_text()


def test_costs_of_baselines():
    rows = read_record(ROOT / "docs" / "results" / "bench-mixers.json")["results"]
    text = (ROOT / "docs" / "baselines.md").read_text()
    assert lm.cost_table(rows).markdown() in text
    times = {row["mixer"]: row["layer_ms"] for row in rows}
    for name in BASELINES.keys() - {"softmax", "softmax-naive"}:
        ratio = times[name] / times["softmax"]
        assert f"{name} {ratio:.2f}" in text[text.index("One layer alone") :], (
            f"{name} is {ratio:.2f} times softmax"
        )


def test_two_small_models_evaluated():
    rows = read_record(ROOT / "docs" / "results" / "eval-local.json", "eval")["results"]
    assert score_table(rows).markdown() in (ROOT / "docs" / "evaluation.md").read_text()


def test_the_efficiency_table():
    rows = read_record(ROOT / "docs" / "results" / "bench-table.json", "bench-table")["results"]
    assert [row["mixer"] for row in rows] == chosen_mixers(["all"])
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
