"""Published records stay the records of their cells: nothing that was trained is trained again."""

import dataclasses
from pathlib import Path

import pytest

from hypermlp.jobs.cells import record_path, recorded
from hypermlp.mad import protocol as mad
from hypermlp.mad.protocol import read_cell
from hypermlp.reporting.records import read_record
from hypermlp.study import protocol
from hypermlp.study.protocol import SIZES, lm_cell
from hypermlp.train import recipe
from hypermlp.train.recipe import Recipe, TrainingSettings, essential, load_recipe

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(params=["as it is", "with new keys"])
def version(request, monkeypatch):
    """This version of the package, and a later one whose recipe and whose MAD trainings have one key more."""
    if request.param == "as it is":
        yield
        return
    training = dataclasses.make_dataclass(
        "TrainingSettings", [("ema", float, 0.0)], bases=(TrainingSettings,), kw_only=True
    )
    later = dataclasses.make_dataclass("Recipe", [("training", training)], bases=(Recipe,), kw_only=True)
    monkeypatch.setattr(recipe, "Recipe", later)
    protocol._row_recipe.cache_clear()
    of_mad = dataclasses.make_dataclass(
        "Training", [("ema", float, 0.0)], bases=(mad.Training,), kw_only=True, frozen=True
    )
    monkeypatch.setattr(mad, "Training", of_mad)
    yield
    protocol._row_recipe.cache_clear()


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("folder", "names"), [("headline", ["headline", "mixing"]), ("study-mini", ["mini"])]
)
def test_every_record_is_that_of_its_cell(folder, names):
    """A new field of a recipe, or another default, must not change the digest of a cell."""
    paths = sorted((RESULTS / folder / "lm").glob("*.json"))
    assert paths
    for path in paths:
        settings = read_record(path)["settings"]
        training = settings["recipe"]["training"]
        size = next(SIZES[name] for name in names if settings["mixer"] in SIZES[name].rows)
        cell = lm_cell(size, settings["mixer"], training["seed"], training["learning_rate"])
        assert record_path(RESULTS / folder, cell) == path
        assert recorded(RESULTS / folder, cell) is not None
        assert size.shared(settings) == size.settings


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("S-pg", "S-pg-1-78e7b767fc97"),
        ("S-p-12o!", "S-p-12o!-1-f232ac21b910"),
        ("S-pg-12o!", "S-pg-12o!-1-3514c405c5c9"),
    ],
)
def test_cells_of_the_factorial_keep_their_names(tmp_path, row, name):
    """These names are those of its first trainings, which resume from folders of the same names."""
    assert record_path(tmp_path, lm_cell(SIZES["factorial"], row, 1, 4e-3)).stem == name


@pytest.mark.usefixtures("version")
def test_every_mad_record_is_that_of_its_cell():
    paths = sorted((RESULTS / "study-mini" / "mad").rglob("*.json"))
    assert paths
    for path in paths:
        cell = read_cell(read_record(path)["settings"])
        assert record_path(RESULTS / "study-mini" / "mad", cell) == path
        assert recorded(RESULTS / "study-mini" / "mad", cell) is not None


@pytest.mark.parametrize("version", ["with new keys"], indirect=True)
def test_a_new_key_counts_where_it_has_another_value(version, tmp_path):
    usual, changed = (
        dataclasses.replace(
            lm_cell(SIZES["headline"], "S-p", 2, 8e-3),
            recipe=load_recipe("cpu-mini", [f"training.ema={ema}"]).to_dict(),
        )
        for ema in (0.0, 0.9)
    )
    assert record_path(tmp_path, usual) != record_path(tmp_path, changed)
    assert essential(changed.recipe)["training"]["ema"] == 0.9
    assert "ema" not in essential(usual.recipe)["training"]
