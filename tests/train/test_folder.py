"""Runs of earlier versions resume, and the folder of a run heals when it is locked."""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

from hypermlp.errors import UserError
from hypermlp.train import folder, recipe
from hypermlp.train.folder import RunFolder
from hypermlp.train.recipe import Recipe, TrainingSettings, load_recipe
from hypermlp.train.run import train

LOSSES = [5.551324844360352, 5.452462196350098, 5.208658695220947, 4.9808125495910645]
"""Those of a run of commit dd9e7c4 that was not interrupted."""


@pytest.fixture
def earlier_run(tmp_path, monkeypatch):
    """A run of commit dd9e7c4 after two of four steps, with its recipe ``r.yaml`` and its data."""
    with tarfile.open(Path(__file__).with_name("run-of-dd9e7c4.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return RunFolder(tmp_path / "run")


@pytest.fixture
def with_a_new_key(monkeypatch):
    """A later version of the package, in which recipes have the key training.ema."""
    training = dataclasses.make_dataclass(
        "TrainingSettings", [("ema", float, 0.0)], bases=(TrainingSettings,), kw_only=True
    )
    later = dataclasses.make_dataclass("Recipe", [("training", training)], bases=(Recipe,), kw_only=True)
    monkeypatch.setattr(recipe, "Recipe", later)
    monkeypatch.setattr(folder, "Recipe", later)


@pytest.mark.thorough
def test_a_run_of_an_earlier_version_goes_on_as_there(earlier_run):
    content = json.loads(earlier_run.record.read_text())
    del content["data_digest"]  # it covers tokenizer.json, whose form the library tokenizers decides
    earlier_run.record.write_text(json.dumps(content))
    train(load_recipe("r.yaml"), earlier_run.path, resume=True)
    records = map(json.loads, (earlier_run.path / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(LOSSES, rel=1e-5)


@pytest.mark.usefixtures("with_a_new_key")
def test_a_key_that_the_recipe_of_a_run_lacks_has_its_default(earlier_run):
    earlier_run.check_recipe(load_recipe("r.yaml"))
    with pytest.raises(
        UserError, match=r"training.ema is 0.5, but the run in .* has 0.0; add --set .*ema=0.0,"
    ):
        earlier_run.check_recipe(load_recipe("r.yaml", ["training.ema=0.5"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.compression=4", None),
        ("model.sliding_window=null", None),
        ("model.match_parameters=null", None),
        ("training.steps=9", None),
        ("model.compression=2", "model.compression is 2, but the run in .* has 4; add --set .*=4,"),
        ("model.sliding_window=8", "sliding_window is 8, but the run in .* has None; add --set .*=null,"),
        ("model.vocab_size=300", "vocab_size is 300, but the run in .* has None"),
        ("data.order=random", "data.order is 'random', but the run in .* has 'shuffled'"),
    ],
)
def test_a_default_that_is_written_out_changes_nothing(earlier_run, change, message):
    if message is None:
        earlier_run.check_recipe(load_recipe("r.yaml", [change]))
    else:
        with pytest.raises(UserError, match=message):
            earlier_run.check_recipe(load_recipe("r.yaml", [change]))


def test_a_replacement_that_was_killed_is_undone(tmp_path):
    (tmp_path / ".final.before").mkdir()
    with RunFolder(tmp_path).lock():
        assert (tmp_path / "final").is_dir()
