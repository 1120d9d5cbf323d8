"""The page and the tables show what the records hold."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from hypermlp.cli import main
from hypermlp.label import PAPER_ROWS
from hypermlp.mad.report import PUBLISHED, Scores
from hypermlp.reporting.records import commit
from hypermlp.study.figures import write_curves
from hypermlp.study.protocol import HEADLINE_ROWS, ROWS
from hypermlp.study.reading import read_study
from hypermlp.study.report import compare, markdown, page, summary


def test_report_writes_page_table_and_summary(made_up, capsys):
    assert main(["study", "report", str(made_up), "--against", str(made_up)]) == 0
    out = capsys.readouterr().out
    assert "| R-12o! | 0.008 | 1,000,000 | 2.00 | 3 | 3.0" in out
    assert "50.0 (49.4)" in out  # MAD beside the paper's
    assert "35 rows in common; largest difference of a loss 0.0000; rank correlation 1.00" in out
    summary = json.loads((made_up / "summary.json").read_text())
    assert set(summary["rows"]) == set(ROWS)
    made_at = f", commit {commit()}." if commit() else "."
    assert made_at in (made_up / "index.html").read_text()
    row = summary["rows"]["R-cg-q-12o"]
    assert row["loss"] == pytest.approx(2.9956, abs=0.01)
    assert row["paper_loss"] == 2.9956
    assert len(row["seeds"]) >= 2
    assert summary["rows"]["R-2o!"]["paper_loss"] == PAPER_ROWS["R-2!"].loss
    assert summary["spearman"]["value"] > 0.98
    assert {claim["claim"]: claim["verdict"] for claim in summary["claims"]}[
        "The lag layout is necessary"
    ] == "supported"


def test_mad_is_compared_with_the_paper_column_by_column(made_up):
    """Five rows rank as in the paper on one task, the other way round on another, and equally on a third."""
    labels = ["S", "S-p", "S-c", "R", "R-p"]
    scores = {
        label: {
            "compression": PUBLISHED[label]["compression"] / 100,
            "memorization": 1 - PUBLISHED[label]["memorization"] / 100,
            "in-context-recall": 1.0,
        }
        for label in labels
    }
    study = replace(read_study(made_up), mad=Scores(scores))
    found = summary(study)["mad_spearman"]
    assert {column: (each["rows"], each["value"]) for column, each in found.items()} == {
        "compression": (5, pytest.approx(1)),
        "memorization": (5, pytest.approx(-1)),
    }
    assert "| compress | 5 | 1.00 (" in markdown(study)
    assert "Does MAD rank the rows as in the paper?" in page(study, "The study")


def test_the_papers_own_losses_support_what_they_support(made_up):
    """The paper's claim about QK and VO holds for softmax rows and not for ReLU rows, in its own numbers."""
    verdicts = {verdict.name: verdict for verdict in read_study(made_up).verdicts}
    assert verdicts["Sequence mixing dominates"].verdict == "supported"
    assert [each.verdict for each in verdicts["Shrink QK, not VO"].effects] == ["supported", "refuted"]


def test_another_run_is_compared(made_up, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made_up, copy)
    for path in copy.glob("lm/R-12o!-*"):
        record = json.loads(path.read_text())
        record["results"]["loss"] += 0.25
        path.write_text(json.dumps(record))
    found = compare(read_study(copy), read_study(made_up))
    assert found.largest == pytest.approx(0.25)
    assert found.same


def test_the_figure_of_many_rows_has_few_colours(made_up, tmp_path):
    figures = list(write_curves(read_study(made_up), tmp_path / "curves"))
    text = next(path for path in figures if path.suffix == ".svg").read_text()
    colours = set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: (?:1.2|0.7)", text))
    assert len(colours) == len(HEADLINE_ROWS) + 1
    assert "HyperGLU (G-cg-q-12o), rate 0.008: " in text
    assert "the other 31 rows" in text


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_the_page_in_a_browser(made_up, tmp_path, browser, size):
    study = read_study(made_up)
    (tmp_path / "index.html").write_text(page(study, "The <study>", compare(study, study)))
    view = browser(tmp_path / "index.html", size)
    assert view.locator("h1").inner_text() == "The <study>"
    assert view.locator(".card").count() == 7
    assert view.locator("svg .series").count() == 35
    assert view.locator("table").last.locator("tbody tr").count() == 35
    dot = view.locator("svg .dot.G").first
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)  # whichever lies on top there
    assert re.search(r"^[SRG]-\S+\nours \d", view.locator("#tip").inner_text())
    curve = view.locator("svg .series").first
    curve.focus()
    assert "at the end" in view.locator("#tip").inner_text()


def test_a_missing_folder_is_not_taken_for_an_empty_one(tmp_path, capsys):
    assert main(["study", "report", str(tmp_path / "nowhere")]) == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert main(["study", "report", str(tmp_path)]) == 2
    assert "has no records of language models" in capsys.readouterr().err
