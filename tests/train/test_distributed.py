"""Two processes on the CPU, started by torchrun, train like one: with copies (DDP) and shards (FSDP2)."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors import safe_open

from hypermlp.train.recipe import load_recipe
from hypermlp.train.run import train

pytestmark = pytest.mark.thorough

SCHEDULE = ["training.decay_steps=8"]


def torchrun(recipe_file, folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [
        word
        for override in (*SCHEDULE, *arguments)
        for word in (("--set", override) if "=" in override else (override,))
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "hypermlp", "train", str(recipe_file), "--out", str(folder), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def records(folder, key):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


def assert_same_curve(ours, single):
    for key in ("loss", "grad_norm", "eval_train_loss", "eval_validation_loss"):
        assert records(ours, key) == pytest.approx(records(single, key), abs=1e-5), key


@pytest.fixture(scope="module")
def single(recipe_of_module):
    folder = recipe_of_module.with_name("single")
    train(load_recipe(str(recipe_of_module), SCHEDULE), folder)
    assert len(records(folder, "loss")) == 8
    return folder


def test_copies_give_the_curve_of_one_process(recipe_of_module, single, tmp_path):
    torchrun(recipe_of_module, tmp_path / "run")
    assert_same_curve(tmp_path / "run", single)
    (total,), (held,) = records(tmp_path / "run", "parameters"), records(tmp_path / "run", "held_by_process")
    assert held == [total, total]


def test_shards_give_the_same_curve_and_resume_with_any_number_of_processes(
    recipe_of_module, single, tmp_path
):
    run = tmp_path / "run"
    torchrun(recipe_of_module, run, "training.sharding=true", "training.steps=4")
    (total,), (held,) = records(run, "parameters"), records(run, "held_by_process")
    assert sum(held) == total
    assert max(held) < 0.55 * total  # half each, except for rows that cannot be halved
    moments = [elements(path) for path in sorted((run / "checkpoint-4" / "optimizer").iterdir())]
    assert len(moments) == 2
    assert max(moments) < 0.55 * sum(moments)  # each process saves its part of the optimizer state

    alone = shutil.copytree(run, tmp_path / "alone")
    train(load_recipe(str(recipe_of_module), SCHEDULE), alone, resume=True)
    assert_same_curve(alone, single)

    torchrun(recipe_of_module, run, "training.sharding=true", "--resume")
    assert_same_curve(run, single)


def test_shards_resume_from_the_checkpoint_of_one_process(recipe_of_module, single, tmp_path):
    train(load_recipe(str(recipe_of_module), [*SCHEDULE, "training.steps=4"]), tmp_path / "run")
    torchrun(recipe_of_module, tmp_path / "run", "training.sharding=true", "--resume")
    assert_same_curve(tmp_path / "run", single)


def elements(path):
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no dictionary
