"""A corpus of a few small documents, and recipes that train in seconds."""

import pytest
import yaml

from hypermlp.train.data import prepare
from hypermlp.train.recipe import load_recipe


def write_corpus(folder):
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(
            f"document {i}: " + " ".join(f"{i * j % 97}" for j in range(60)) + "\n"
        )
    return folder


def write_recipe(folder):
    content = {
        "name": "tiny",
        "model": {
            "mixer": "G-cg-q-12o",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 1,
            "rank": 4,
        },
        "data": {
            "source": str(folder / "corpus"),
            "context": 32,
            "cache": str(folder / "prepared"),
            "validation": 0.1,
        },
        "training": {
            "steps": 8,
            "batch_tokens": 256,
            "micro_batch": 4,
            "learning_rate": 2e-3,
            "warmup_steps": 2,
            "eval_every": 4,
            "eval_sequences": 6,
            "save_every": 2,
            "log_every": 1,
            "report_to": [],
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def recipe_file(tmp_path, corpus):
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def recipe_of_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("module")
    write_corpus(folder / "corpus")
    return write_recipe(folder)


@pytest.fixture
def prepared(recipe_file):
    return prepare(load_recipe(str(recipe_file)).data)
