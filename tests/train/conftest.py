"""A corpus of a few small documents, and recipes that train in seconds."""

import pytest
import yaml


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + " ".join(f"{i * j % 97}" for j in range(60)) + "\n")
    return folder


@pytest.fixture
def recipe_file(tmp_path, corpus):
    content = {
        "name": "tiny",
        "model": {"mixer": "G-cg-q-12o", "hidden_size": 32, "num_hidden_layers": 2, "rank": 4},
        "data": {"source": str(corpus), "context": 32, "cache": str(tmp_path / "prepared"), "validation": 0.1},
        "training": {
            "steps": 8,
            "batch_tokens": 256,
            "micro_batch": 4,
            "learning_rate": 2e-3,
            "warmup_steps": 2,
            "eval_every": 4,
            "eval_batches": 1,
            "save_every": 2,
            "log_every": 1,
            "report_to": [],
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
