"""The scaling study: points, extrapolated rates and fitted lines by hand; a smoke plan from end to end."""

import json
import math

import numpy as np
import pytest

from hypermlp.cli import main
from hypermlp.costs.model import model_parameters
from hypermlp.study import scale_report
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.study.scale import PLANS, SCALE_ROWS, extrapolated_rate, find_points, read_scale
from hypermlp.study.scale_report import fits_table, fitted, points_table, rates_table
from hypermlp.train.recipe import Recipe, build

FULL = PLANS["full"]
SMALL, MIDDLE, LARGE, HUGE = FULL
BEST = {SMALL: 3.2e-2, MIDDLE: 1.6e-2, LARGE: 1.6e-2}


def recipe(name, row):
    return build(Recipe, lm_cell(FULL[name], row, 2, 8e-3).recipe, "")


def test_tokens_are_in_proportion_to_parameters_and_rows_have_equal_ones():
    counts = {}
    for name in FULL:
        own = [model_parameters(recipe(name, row).model_config(257)) for row in SCALE_ROWS]
        assert max(own) / min(own) < 1.005, name
        training = recipe(name, "S-p").training
        assert 4.4 < training.steps * training.batch_tokens / own[0] < 4.9, name
        counts[name] = own[0]
    assert list(counts.values()) == sorted(counts.values())
    assert counts["1.06M"] == 1_061_120


def test_one_size_has_the_cells_of_the_headline_study():
    assert lm_cell(FULL[LARGE], "S-p", 2, 8e-3) == lm_cell(SIZES["headline"], "S-p", 2, 8e-3)


def test_sizes_by_name():
    assert list(find_points("full", [])) == ["0.16M", "0.36M", "1.06M"]
    assert find_points("full", ["2.7M"]) == {HUGE: FULL[HUGE]}
    with pytest.raises(ValueError, match=r"unknown point '3M'; allowed: 0\.16M"):
        find_points("full", ["3M"])


def test_a_line():
    xs = [10.0, 100.0, 1000.0, 1000.0]
    line = fitted([(x, 5 - 2 * math.log10(x)) for x in xs])
    assert line.slope == pytest.approx((-2, -2, -2))
    assert line.at(10_000.0) == pytest.approx((-3, -3, -3))
    noisy = fitted([(10.0, 3.0), (100.0, 1.1), (1000.0, -1.0)])
    residuals = np.array([3.0, 1.1, -1.0]) - np.polyval(np.polyfit([1, 2, 3], [3.0, 1.1, -1.0], 1), [1, 2, 3])
    half = 12.706 * math.sqrt(float(residuals @ residuals) / 2)
    assert noisy.slope == pytest.approx((-2, -2 - half, -2 + half))
    assert fitted([(10.0, 1.0), (100.0, 2.0)]) is None
    assert fitted([(10.0, 1.0)] * 3) is None


@pytest.fixture
def made_up(tmp_path, write_lm):
    """Losses that fall by 0.3 per tenfold parameters; the lead of HyperGLU stays 0.1."""
    folder, headline = tmp_path / "scale", tmp_path / "headline"
    for name, best in BEST.items():
        place, size = headline if name == LARGE else folder / name, FULL[name]
        parameters = model_parameters(recipe(name, SCALE_ROWS[0]).model_config(257))
        costs = {"forward_flops_per_token": 2 * parameters, "tokens": 5 * parameters}
        more = {"parameters": parameters, **costs}
        for row in SCALE_ROWS:
            loss = 3 - 0.3 * math.log10(parameters) + (0.0 if row == "G-cg-q-12o" else 0.1)
            for rate in {*size.rates, 2 * max(size.rates), best / 2}:
                off = 0.02 * abs(math.log2(rate / best))
                write_lm(place, lm_cell(size, row, 1, rate), loss + off, **more)
            for seed in size.seeds:
                write_lm(place, lm_cell(size, row, seed, best), loss + seed / 1000, **more)
    return folder, headline


def test_rates_are_extrapolated(made_up):
    found = read_scale(FULL, *made_up)
    rates = {name: {row.rate for row in study.all_rows.values()} for name, study in found.items()}
    assert {name: rates[name] for name in BEST} == {name: {rate} for name, rate in BEST.items()}
    # A power law through the two small sizes, rounded to the grid
    sizes = [model_parameters(recipe(name, "S-p").model_config(257)) for name in BEST]
    power = math.log(0.5) / math.log(sizes[1] / sizes[0])
    exact = 1.6e-2 * (sizes[2] / sizes[1]) ** power
    predicted = extrapolated_rate(found, "S-p", FULL[LARGE])
    assert predicted == 8e-3
    assert abs(math.log2(predicted / exact)) <= 0.5
    assert extrapolated_rate(found, "S-p", FULL[MIDDLE]) is None
    lines = {tuple(line[:2]): line for line in rates_table(found).rows}
    assert lines["S-p", "1.06M"][2:] == ["0.016", "tuned", "0.008", "+0.020"]


def test_the_report_fits_lines_and_shows_what_is_missing(made_up):
    found = read_scale(FULL, *made_up)
    table = points_table(found)
    assert len(table.rows) == 12
    assert table.rows[-1][-5:] == ["missing"] * 5
    softmax = {tuple(line[:2]): line for line in table.rows}["S-p", "0.16M"]
    assert softmax[-1].startswith("+0.100 (+0.100")
    slopes = {line[0]: line for line in fits_table(found).rows}
    assert float(slopes["S-p"][1].split()[0]) == pytest.approx(-0.3, abs=0.002)
    assert slopes["S-p"][3].split(" (")[0] in ("+0.000", "-0.000")
    summary = scale_report.summary(found)
    assert len(summary["points"]) == 9
    assert summary["points"][0]["training_flops"] == pytest.approx(
        30 * summary["points"][0]["parameters"] ** 2
    )


def test_the_command_reports_without_training(made_up, capsys):
    folder, headline = made_up
    assert main(["study", "scale", "--report", "--out", str(folder), "--headline", str(headline)]) == 0
    assert "| S-p | 1.06M | 0.016 | 1,061,120 |" in capsys.readouterr().out
    assert (folder / "scaling.png").stat().st_size > 5_000
    assert "HyperGLU (G-cg-q-12o)" in (folder / "scaling.svg").read_text()


@pytest.mark.parametrize("size", ["phone", "desk"])
def test_the_page_in_a_browser(made_up, tmp_path, browser, size):
    points = find_points("full", [])
    found = read_scale(points, *made_up)
    (tmp_path / "index.html").write_text(scale_report.page(found, "Scale"))
    view = browser(tmp_path / "index.html", size)
    assert view.locator("svg").count() == 2
    assert view.locator("svg .series").count() == 6
    assert view.locator("table").count() == 3


@pytest.mark.usefixtures("server")
@pytest.mark.thorough
def test_the_smoke_plan(tmp_path, capsys):
    command = ["study", "scale", "--plan", "smoke", "--points", "small", "middle", "large"]
    options = ["--out", str(tmp_path), "--jobs", "2", "--threads", "1"]
    assert main([*command, *options]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert len(found["points"]) == 9
    assert all(len(point["losses"]) == 2 for point in found["points"])
    assert set(found["slopes"]["parameters"]) == set(SCALE_ROWS)
    assert "extrapolated rates: G-cg-q-12o" in capsys.readouterr().err
    records = {path: path.read_bytes() for path in tmp_path.rglob("lm/*.json")}
    assert main([*command, *options]) == 0  # nothing is trained again
    assert {path: path.read_bytes() for path in tmp_path.rglob("lm/*.json")} == records


def test_a_large_size_without_smaller_ones_is_refused(tmp_path, capsys):
    assert main(["study", "scale", "--points", "2.7M", "--out", str(tmp_path)]) == 2
    assert "needs two sizes with tuned rates" in capsys.readouterr().err
