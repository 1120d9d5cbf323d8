"""A run learns, stops on signals and bad losses, and resumes bit for bit."""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hypermlp import sealed
from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM, loading
from hypermlp.train import run as training
from hypermlp.train.folder import RunFolder
from hypermlp.train.recipe import load_recipe
from hypermlp.train.run import build_model, build_trainer, train
from hypermlp.train.trainer import BadLossError

pytestmark = pytest.mark.thorough


def everything(folder):
    """Return what a resumed run depends on: weights, optimizer, schedule, random generators, position."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return {
        **load_file(folder / "model.safetensors"),
        **load_file(next((folder / "optimizer").iterdir())),
        "schedule": torch.load(folder / "scheduler.pt", weights_only=True),
        "random": (folder / "rng_state.pth").read_bytes(),
        "step": state["global_step"],
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert same, name


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def test_a_run_learns_and_ends_with_a_model_that_loads(recipe_file, tmp_path, prepared):
    final = train(load_recipe(str(recipe_file)), tmp_path / "run")
    model = HyperMLPForCausalLM.from_pretrained(final)
    assert_same(
        dict(model.state_dict()),
        dict(HyperMLPForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-8").state_dict()),
    )
    curve = losses(tmp_path / "run")
    assert [step for step, _ in curve] == list(range(1, 9))
    assert curve[-1][1] < curve[0][1] - 0.2
    passes = 8 * 8 / ((len(prepared.tokens["train"]) - 1) // 32)  # of 8 sequences in each of 8 steps
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["epoch"] == round(passes, 4)
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 32)
    prompts = tokenizer(["document 1", "doc"], padding=True, return_tensors="pt")
    assert model.generate(**prompts, max_new_tokens=4).shape == (2, len("document 1") + 4)


def test_half_and_half_equals_the_whole(recipe_file, tmp_path):
    """Weights, optimizer, schedule, random generators and data position are equal bit for bit."""
    train(load_recipe(str(recipe_file)), tmp_path / "whole")
    interrupted = load_recipe(str(recipe_file), ["training.steps=4", "training.decay_steps=8"])
    train(interrupted, tmp_path / "halves")
    train(load_recipe(str(recipe_file), ["training.decay_steps=8"]), tmp_path / "halves", resume=True)
    assert_same(
        everything(tmp_path / "whole" / "checkpoint-8"), everything(tmp_path / "halves" / "checkpoint-8")
    )
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")


def test_resume_passes_over_a_damaged_checkpoint(recipe_file, tmp_path, capsys):
    recipe, run = load_recipe(str(recipe_file)), tmp_path / "run"
    train(recipe, run)
    whole = everything(run / "checkpoint-8")
    weights = run / "checkpoint-8" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # the loaded weights may still be mapped to this file
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    train(recipe, run, resume=True)
    assert "passing over" in capsys.readouterr().out
    assert_same(whole, everything(run / "checkpoint-8"))


def test_a_run_is_not_overwritten_and_not_changed(recipe_file, tmp_path):
    run = tmp_path / "run"
    train(load_recipe(str(recipe_file)), run)
    with pytest.raises(ValueError, match="has checkpoints already; pass --resume"):
        train(load_recipe(str(recipe_file)), run)
    with pytest.raises(ValueError, match="training.learning_rate is 0.1, but the run .* has 0.002"):
        train(load_recipe(str(recipe_file), ["training.learning_rate=0.1"]), run, resume=True)


def test_init_from_takes_the_weights_and_nothing_else(recipe_file, tmp_path):
    recipe = load_recipe(str(recipe_file))
    final = train(recipe, tmp_path / "first")
    train(recipe, tmp_path / "second", init_from=str(final))
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[0][0] == 1  # a new run counts from the beginning
    assert second[0][1] < first[0][1] - 0.2
    # There is no checkpoint to resume from, so the run begins with the weights.
    train(recipe, tmp_path / "third", resume=True, init_from=str(final))
    assert losses(tmp_path / "third") == second


def test_init_from_with_another_context_extends_the_model(recipe_file, tmp_path, capsys):
    final = train(load_recipe(str(recipe_file)), tmp_path / "first")
    for context in (48, 16):
        longer = load_recipe(
            str(recipe_file), [f"data.context={context}", "training.batch_tokens=192", "training.steps=2"]
        )
        other = train(longer, tmp_path / str(context), init_from=str(final))
        assert f"has a context of 32; it now has one of {context}" in capsys.readouterr().out
        assert loading.our_config(str(other)).max_position_embeddings == context


def test_init_from_says_what_the_recipe_changes(recipe_file, tmp_path, capsys):
    windowed = train(load_recipe(str(recipe_file), ["model.sliding_window=8"]), tmp_path / "first")
    recipe = load_recipe(str(recipe_file), ["training.steps=2"])
    train(recipe, tmp_path / "second", init_from=str(windowed))
    assert "has sliding_window 8; the recipe sets None (model.sliding_window)" in capsys.readouterr().out
    matched = load_recipe(str(recipe_file), ["model.mixer=S-p", "model.match_parameters=G-cg-q-12o"])
    softmax = train(matched, tmp_path / "third")
    longer = ["model.mixer=S-p", "model.match_parameters=G-cg-q-12o", "data.context=64"]
    with pytest.raises(UserError, match="match_parameters gives an MLP of width .*intermediate_size="):
        train(load_recipe(str(recipe_file), longer), tmp_path / "fourth", init_from=str(softmax))


def test_init_from_is_remembered_until_the_first_checkpoint(recipe_file, tmp_path):
    recipe = load_recipe(str(recipe_file))
    final = train(recipe, tmp_path / "first")
    train(recipe, tmp_path / "second", init_from=str(final))
    for folder in sealed.checkpoints(tmp_path / "second"):
        shutil.rmtree(folder)  # as if the run had been killed before its first checkpoint
    whole = losses(tmp_path / "second")
    train(recipe, tmp_path / "second", resume=True)
    assert losses(tmp_path / "second") == whole


def test_weights_that_do_not_fit_are_refused(recipe_file, tmp_path):
    final = train(load_recipe(str(recipe_file)), tmp_path / "first")
    with pytest.raises(ValueError, match="do not fit the recipe's model, which has hidden_size 64, not 32"):
        train(
            load_recipe(str(recipe_file), ["model.hidden_size=64"]), tmp_path / "second", init_from=str(final)
        )
    with pytest.raises(ValueError, match="--init-from: .* has no model"):
        train(load_recipe(str(recipe_file)), tmp_path / "second", init_from=str(tmp_path))


def test_a_run_goes_on_with_its_own_data_only(recipe_file, tmp_path, corpus):
    train(load_recipe(str(recipe_file), ["training.steps=4", "training.decay_steps=8"]), tmp_path / "run")
    (corpus / "00.txt").write_text("something else")
    with pytest.raises(ValueError, match="the data is not what the run in .* began with"):
        train(load_recipe(str(recipe_file), ["training.decay_steps=8"]), tmp_path / "run", resume=True)


def test_one_process_writes_to_a_folder(recipe_file, tmp_path):
    with (
        RunFolder(tmp_path / "run").lock(),
        pytest.raises(UserError, match="another process is training in"),
    ):
        train(load_recipe(str(recipe_file)), tmp_path / "run")
    train(load_recipe(str(recipe_file)), tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "init_from", "message"),
    [
        (["data.source=missing/texts"], None, "missing"),
        (["training.steps=4"], "missing/model", "missing"),
        (["data.context=16384", "training.batch_tokens=65536"], None, "make no sequence of data.context"),
    ],
)
def test_a_run_that_is_refused_leaves_no_folder(recipe_file, tmp_path, overrides, init_from, message):
    recipe = load_recipe(str(recipe_file), overrides)
    with pytest.raises(UserError, match=message):
        train(recipe, tmp_path / "run", init_from=init_from)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=message):
        train(recipe, tmp_path / "run", init_from=init_from)
    assert (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(recipe_file, tmp_path, capsys):
    recipe = load_recipe(str(recipe_file))
    final = train(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train(recipe, tmp_path / "run", resume=True) == final
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("seal", ["", "{}", "[]", '{"sha256": []}', '{"sha256": {"model.safetensors": "0"}}'])
def test_damaged_checkpoints_do_not_crowd_out_good_ones(recipe_file, tmp_path, seal):
    """Damaged checkpoints do not stop the run and do not count among those that are kept."""
    run = tmp_path / "run"
    train(load_recipe(str(recipe_file)), run)
    for folder in sealed.checkpoints(run):
        (folder / "complete.json").write_text(seal)
    (run / "checkpoint-7").write_text("a stray file")
    train(load_recipe(str(recipe_file), ["training.steps=6", "training.decay_steps=8"]), run, resume=True)
    assert [folder.name for folder in sealed.checkpoints(run)] == ["checkpoint-6", "checkpoint-4"]
    assert sealed.newest_complete(run).name == "checkpoint-6"


def test_a_non_finite_loss_stops_the_run_and_saves_its_batch(recipe_file, tmp_path, prepared):
    recipe, run = load_recipe(str(recipe_file)), tmp_path / "run"
    run.mkdir()
    model = build_model(recipe, prepared, None)
    trainer = build_trainer(recipe, run, prepared, model)
    with torch.no_grad():
        model.model.embed_tokens.weight[int(trainer.train_dataset[20]["input_ids"][3])] = float("nan")
    with pytest.raises(BadLossError, match="the loss is nan at step"):
        trainer.train()
    record = json.loads(next(run.glob("bad-batch-step-*.json")).read_text())
    assert len(record["batch"]["input_ids"]) == recipe.training.micro_batch


def test_a_non_finite_gradient_stops_the_run_before_the_update(recipe_file, tmp_path, prepared):
    recipe, run = load_recipe(str(recipe_file)), tmp_path / "run"
    run.mkdir()
    model = build_model(recipe, prepared, None)
    trainer = build_trainer(recipe, run, prepared, model)
    before = model.model.norm.weight.detach().clone()
    model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(BadLossError, match="the gradient is nan at step 0"):
        trainer.train()
    assert torch.equal(model.model.norm.weight, before)


def test_an_unknown_tracker_is_a_mistake_of_the_user(recipe_file, tmp_path):
    recipe = load_recipe(str(recipe_file), ["training.report_to=[nonsense]"])
    with pytest.raises(
        UserError, match=r"training.report_to is \['nonsense'\]; it must be a list with some of"
    ):
        train(recipe, tmp_path / "run")


def test_an_exploding_loss_stops(recipe_file, tmp_path, capsys):
    overrides = [
        "training.steps=60",
        "training.learning_rate=9",
        "training.explosion=1.5",
        "training.warmup_steps=40",
        "training.clip=1e9",
    ]
    arguments = [word for override in overrides for word in ("--set", override)]
    assert main(["train", str(recipe_file), "--out", str(tmp_path / "run"), *arguments]) == 2
    assert "the batch is in" in capsys.readouterr().err


def run_command(arguments, limit=None, errors=None):
    os.setpgrp()
    if errors is not None:
        sys.stderr = errors.open("w")
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    torch.set_num_threads(1)
    raise SystemExit(main(["train", *arguments]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_and_stops(recipe_file, tmp_path, server, number):
    run = tmp_path / "run"
    arguments = [
        str(recipe_file),
        "--out",
        str(run),
        "--set",
        "training.steps=500",
        "--set",
        "training.save_every=500",
    ]
    process = server.Process(target=run_command, args=(arguments, None, tmp_path / "errors"))
    process.start()
    while not (run / "metrics.jsonl").exists() or len(losses(run)) < 3:
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 0
    assert 3 <= sealed.step_of(sealed.newest_complete(run)) < 500
    assert "with --resume continues" in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("hidden", ["no", "replaced", "swallowed"])
def test_a_signal_before_the_first_step_stops_in_order(recipe_file, tmp_path, server, hidden):
    """The exception of the handler may arrive inside code that replaces it by its own, or swallows it."""
    arguments = [str(recipe_file), "--out", str(tmp_path / "run")]
    process = server.Process(target=stop_while_preparing, args=(arguments, hidden))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not (tmp_path / "run" / "final").exists()


def stop_while_preparing(arguments, hidden):
    prepare = training.prepare

    def stopped(data):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            if hidden == "replaced":
                raise ValueError("an error of another library") from error
            if hidden == "no":
                raise
        return prepare(data)

    training.prepare = stopped
    run_command(arguments)


def test_a_resumed_run_takes_its_frequencies_from_the_recipe(recipe_file, tmp_path):
    path = tmp_path / "run"
    same = ["training.decay_steps=8", "training.keep=9"]
    train(load_recipe(str(recipe_file), [*same, "training.steps=4"]), path)
    changes = ["training.save_every=3", "training.eval_every=2", "training.log_every=2"]
    train(load_recipe(str(recipe_file), [*same, *changes]), path, resume=True)
    assert [sealed.step_of(folder) for folder in sealed.checkpoints(path)] == [8, 6, 4, 2]
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "eval_train_loss" in r] == [4, 6, 8]
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 6, 8]


def test_a_full_disk_leaves_the_checkpoint_before(recipe_file, tmp_path, server):
    run = tmp_path / "run"
    train(load_recipe(str(recipe_file), ["training.steps=4", "training.decay_steps=8"]), run)
    before = everything(run / "checkpoint-4")
    arguments = [str(recipe_file), "--out", str(run), "--set", "training.decay_steps=8", "--resume"]
    process = server.Process(target=run_command, args=(arguments, 50_000, tmp_path / "errors"))
    process.start()
    process.join(60)
    assert process.exitcode == 2
    said = (tmp_path / "errors").read_text().strip().splitlines()[-1]
    assert re.match(r"hypermlp train: checkpoint .*run/checkpoint-\d+ could not be written \(.*\); the", said)
    assert len(said) < 700
    assert sealed.newest_complete(run).name == "checkpoint-4"
    assert_same(before, everything(run / "checkpoint-4"))
    assert not list((run / sealed.ASIDE).glob("*"))


def test_killed_at_20_random_moments_the_weights_are_the_same(recipe_file, tmp_path, server):
    """Runs that are killed with SIGKILL and resumed end with the weights of a run that was never killed.

    A process is killed a number of checkpoints and a fraction of a second after it began, so the test does
    not depend on how long starting takes.
    """
    settings = ["--set", "training.steps=24", "--set", "training.save_every=1", "--set", "training.keep=1"]

    def step(folder):
        return max(map(sealed.step_of, sealed.checkpoints(folder)), default=0)

    def attempt(folder, kill_after=None):
        process = server.Process(
            target=run_command, args=([str(recipe_file), "--out", str(folder), "--resume", *settings],)
        )
        began = step(folder)
        process.start()
        if kill_after is not None:
            steps, seconds = kill_after
            while process.is_alive() and step(folder) < began + steps:
                time.sleep(0.002)
            process.join(seconds)
            process.kill()
        process.join(120)
        return process.exitcode

    assert attempt(tmp_path / "whole") == 0
    moments, kills, runs, resumed = random.Random(0), 0, 0, 0
    while kills < 20:
        folder, runs = tmp_path / f"killed-{runs}", runs + 1
        while (
            code := attempt(
                folder, (moments.randrange(4), moments.uniform(0.01, 0.2)) if kills < 20 else None
            )
        ) != 0:
            assert code == -signal.SIGKILL
            kills += 1
            resumed += step(folder) > 0
        assert_same(everything(tmp_path / "whole" / "checkpoint-24"), everything(folder / "checkpoint-24"))
    assert resumed >= 10  # most kills happen in the middle of a run
