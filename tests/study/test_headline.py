"""The size ``headline``: rows against HyperGLU, seed by seed, and what is missing."""

import math

import pytest

from hypermlp.cli import main
from hypermlp.study.contrast import contrast_table, contrasts
from hypermlp.study.missing import missing
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.report import markdown, page
from hypermlp.study.summary import read_study

HEADLINE = SIZES["headline"]
HYPERGLU = "G-cg-q-12o"
LOSSES = {  # row -> rate, losses of seeds 2, 3, ...
    HYPERGLU: (1.6e-2, [1.10, 1.12, 1.11, 1.13, 1.09]),
    "S-p": (8e-3, [1.20, 1.21, 1.22, 1.22, 1.20]),
    "S-pc": (8e-3, [1.15, 1.17]),
}


@pytest.fixture
def headline(tmp_path, write_lm):
    """Three rows, one of them with two of its five seeds; HyperMLP has been tuned only in part."""
    for row, (best, losses) in LOSSES.items():
        for rate in HEADLINE.rates:
            write_lm(tmp_path, lm_cell(HEADLINE, row, 1, rate), 1.0 + abs(math.log2(rate / best)))
        for seed, loss in enumerate(losses, 2):
            local = {"bits per byte": {"value": loss / math.log(2)}, "recall": {"value": 0.15}}
            write_lm(tmp_path, lm_cell(HEADLINE, row, seed, best), loss, local=local)
    write_lm(tmp_path, lm_cell(HEADLINE, "R-cg-q-12o", 1, 4e-3), 1.3)
    return tmp_path


def test_differences_are_paired_by_seed(headline):
    reference, softmax, conv = (
        {each.label: each for each in contrasts(read_study(headline), HYPERGLU)}[row]
        for row in (HYPERGLU, "S-p", "S-pc")
    )
    assert reference.differences == {}
    differences = [0.10, 0.09, 0.11, 0.09, 0.11]
    mean = sum(differences) / 5
    deviation = math.sqrt(sum((each - mean) ** 2 for each in differences) / 4)
    half = 2.776 * deviation / math.sqrt(5)
    assert softmax.differences["loss"] == pytest.approx((mean, mean - half, mean + half))
    assert softmax.common == 5
    assert conv.common == 2
    assert conv.differences["bits per byte"].value == pytest.approx(0.05 / math.log(2))


def test_the_table_has_a_line_for_every_row(headline):
    table = contrast_table(read_study(headline), HYPERGLU)
    lines = {line[0]: line for line in table.rows}
    assert set(lines) == set(HEADLINE.rows)
    assert lines[HYPERGLU][4:6] == ["1.110 (1.090 to 1.130)", "reference"]
    assert lines["S-p"][1] == "0.008"
    assert lines["S-p"][5].startswith("+0.100 (+0.0")
    assert lines["R-cg-q-12o"][1:] == ["missing"] * (len(table.columns) - 1)


def test_what_is_missing_is_said(headline):
    study = read_study(headline)
    assert missing(study) == [
        "No loss for R-cg-q-12o: no learning rate has been chosen yet.",
        "S-pc lacks seed 4, 5, 6.",
    ]
    assert study.verdicts == []  # the paper's claims are about other parameter counts
    shown = page(study, "Headline")
    assert "S-pc lacks seed 4, 5, 6." in shown
    assert "Comparison with G-cg-q-12o" in shown
    assert "claims" not in shown
    assert "| R-cg-q-12o | 1.300 |  |  |  |" in markdown(study)


def test_the_command_writes_page_and_figure(headline, tmp_path, capsys):
    assert main(["study", "report", str(headline), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "index.html").exists()
    assert main(["study", "figure", str(headline), "--out", str(tmp_path / "figures" / "curves")]) == 0
    assert (tmp_path / "figures" / "curves.png").stat().st_size > 5_000
    drawn = (tmp_path / "figures" / "curves.svg").read_text()
    assert "HyperGLU (G-cg-q-12o), rate 0.016: 1.110" in drawn


def test_a_tuning_seed_is_not_reported_even_if_it_has_one_rate_so_far(tmp_path, write_lm):
    for row in HEADLINE.rows:
        write_lm(tmp_path, lm_cell(HEADLINE, row, 1, 4e-3), 1.2)
    study = read_study(tmp_path)
    assert not study.rows
    assert missing(study) == [
        "No loss for S-p, S-pc, R-cg-q-12o, G-cg-q-12o: no learning rate has been chosen yet."
    ]


def test_a_figure_without_reported_seeds_is_refused(tmp_path, write_lm, capsys):
    for rate in HEADLINE.rates:
        write_lm(tmp_path, lm_cell(HEADLINE, "S-p", 1, rate), 1.2)
    assert main(["study", "figure", str(tmp_path)]) == 2
    assert "no row has a reported seed yet" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_the_page_in_a_browser(headline, tmp_path, browser, size):
    (tmp_path / "index.html").write_text(page(read_study(headline), "Headline"))
    view = browser(tmp_path / "index.html", size)
    assert view.locator("svg .interval").count() == 2
    assert view.locator("svg .series").count() == 3
    assert view.locator("p.key span").count() == 3
