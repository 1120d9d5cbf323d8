"""Published records stay the records of their cells: nothing that was trained is trained again."""

from pathlib import Path

import pytest

from hypermlp.jobs.cells import record_path, recorded
from hypermlp.reporting.records import read_record
from hypermlp.study.protocol import SIZES, lm_cell, size_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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
        assert size_of(settings, {settings["mixer"]}) == size
