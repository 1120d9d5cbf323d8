"""Checkpoints under the harness: scores do not depend on the batch, and what is missing is named."""

import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hypermlp.cli import main
from hypermlp.evals import local, suites
from hypermlp.evals.checkpoint import CheckpointLM
from hypermlp.evals.run import evaluate, prepare_tasks, quiet
from hypermlp.evals.table import score_table
from hypermlp.train.tokenization import build_tokenizer, save_tokenizer
from tests.checkpoints import byte_model, save

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness has its own
CONTEXT = 256


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint of ours and one of another architecture, GPT-2."""
    ours, tokenizer = byte_model(max_position_embeddings=CONTEXT)
    end = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "n_positions": CONTEXT, "n_embd": 32, "n_layer": 1, "n_head": 2}
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model in {"ours": ours, "gpt2": GPT2LMHeadModel(GPT2Config(**sizes, **end))}.items():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # far from uniform, so that scores differ
        save(model, tokenizer, folder / name)
    return folder


def scores(checkpoint, **how):
    how = {"batch_size": 4, "max_length": None, "limit": 6, "device": "cpu", **how}
    row = evaluate(str(checkpoint), "local", report=lambda line: None, **how)
    return {title: score["value"] for title, score in row["scores"].items()}


@pytest.mark.parametrize("name", ["ours", "gpt2"])
def test_the_batch_does_not_change_scores(checkpoints, name):
    alone, together = scores(checkpoints / name, batch_size=1), scores(checkpoints / name, batch_size=7)
    assert together == pytest.approx(alone, rel=1e-6)


def test_the_context_does_not_change_questions_that_fit(checkpoints):
    whole, shorter = scores(checkpoints / "ours"), scores(checkpoints / "ours", max_length=CONTEXT - 30)
    assert shorter["continuation"] == whole["continuation"]
    assert shorter["recall"] == whole["recall"]
    assert shorter["bits per byte"] != whole["bits per byte"], "a text is read in windows of the context"


def test_bits_per_byte_are_the_models_own_loss(checkpoints):
    """A text is read in windows; each begins with the last token of the previous one."""
    lm = CheckpointLM(pretrained=str(checkpoints / "ours"), device="cpu")
    text = local.text()["test"][0]["text"]
    tokens = torch.tensor([[lm.tokenizer.eos_token_id, *lm.tokenizer(text)["input_ids"]]])
    nats = 0.0
    for first in range(0, tokens.shape[1] - 1, CONTEXT):
        window = tokens[:, first : first + CONTEXT + 1]
        if window.shape[1] <= CONTEXT:  # the last window reaches back as far as it can
            reach = tokens[:, -CONTEXT - 1 :]
            counted = window.shape[1] - 1
            logits = lm.model(reach[:, :-1]).logits[:, -counted:]
        else:
            logits = lm.model(window[:, :-1]).logits
        nats += float(torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum"))
    expected = nats / len(text.encode()) / torch.log(torch.tensor(2.0)).item()
    assert scores(checkpoints / "ours", limit=1)["bits per byte"] == pytest.approx(expected, rel=1e-5)


def test_several_side_by_side_with_a_record(checkpoints, tmp_path, capsys):
    record = tmp_path / "eval.json"
    folders = [str(checkpoints / name) for name in ("ours", "gpt2")]
    assert main(["eval", *folders, "--limit", "4", "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(record.read_text())
    assert written["kind"] == "eval"
    assert [row["checkpoint"] for row in written["results"]] == folders
    assert "RULER is left out" in printed
    assert score_table(written["results"]).markdown() in printed
    assert "| average rank |" in printed


def test_the_harness_runs_without_a_git_repository(checkpoints, tmp_path, monkeypatch, capfd):
    """lm_eval.simple_evaluate would run git, which writes its errors past sys.stderr."""
    monkeypatch.chdir(tmp_path)
    assert scores(checkpoints / "ours", limit=1)
    assert capfd.readouterr().err == ""


def test_quiet_hides_output_but_not_errors(capsys):
    logger = logging.getLogger("lm_eval.somewhere")

    def work():
        print("progress")
        warnings.warn("deprecated", stacklevel=1)
        logger.warning("a warning")
        logger.error("an error")
        raise KeyError

    with pytest.raises(KeyError), quiet():
        work()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "an error\n"
    assert logger.isEnabledFor(logging.WARNING)
    assert logging.StreamHandler not in map(type, logging.root.handlers)


class Task:
    """The part of a task of the harness that holds its few-shot settings."""

    def __init__(self, num_fewshot):
        self.config, self.seed = {"num_fewshot": num_fewshot}, None

    def get_config(self, key):
        return self.config[key]

    def set_config(self, key, value):
        self.config[key] = value

    def set_fewshot_seed(self, seed):
        self.seed = seed


@pytest.mark.parametrize(
    ("own", "shots", "expected"), [(None, 0, 0), (None, 3, 3), (5, 3, 3), (5, 0, 5), (0, 3, 0)]
)
def test_few_shot_examples_follow_the_rules_of_the_harness(own, shots, expected):
    tasks = {"a": Task(own), "b": Task(own)}
    prepare_tasks({"tasks": tasks}, shots)
    assert [(task.config["num_fewshot"], task.seed) for task in tasks.values()] == 2 * [(expected, 1234)]


def test_the_recall_task_asks_for_what_stands_there():
    for question in local.recall()["test"]:
        key = question["context"].rsplit("\n", 1)[1]
        assert f"{key}{question['choices'][question['label']]}\n" in question["context"]


def test_the_true_continuation_is_in_the_corpus():
    held_out = "".join(piece["text"] for piece in local.text()["test"])
    for question in local.continuations()["test"]:
        assert question["context"] + question["choices"][question["label"]] in held_out


def test_what_is_missing_is_said_before_anything_runs(checkpoints, monkeypatch, capsys):
    def unreachable(self, names):
        if names == ["hellaswag"]:
            raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")
        if names == ["leaderboard_ifeval"]:
            raise ModuleNotFoundError("No module named 'langdetect'")
        return {"groups": {}, "tasks": {names[0]: None}}

    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", lambda self, **settings: None)
    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", unreachable)
    assert main(["eval", str(checkpoints / "ours"), "--suite", "paper"]) == 2
    said = capsys.readouterr().err
    assert "hellaswag: Couldn't reach 'Rowan/hellaswag'" in said
    assert "hypermlp eval --fetch --suite paper" in said
    assert "pip install 'lm_eval[hf,math,ifeval]'" in said
    assert "boolq" not in said


def test_ruler_where_the_context_has_room():
    assert suites.columns("local", context=4095, vocab_size=50_000) == suites.LOCAL
    for vocab_size in (50_000, 257):
        titles = [column.title for column in suites.columns("local", context=9000, vocab_size=vocab_size)]
        assert "niah_single_1, 8192 tokens" in titles
        assert ("vt, 8192 tokens" in titles) == (vocab_size > 257)


NONSENSE = [
    "",
    "tests",
    "tiny@window",
    "x --batch 0",
    "x --limit -1",
    "x --json .",
    "x --json -",
    "x --device nonsense",
]


@pytest.mark.parametrize("wrong", [*(words.split() for words in NONSENSE), [""]])
def test_nonsense_is_refused(wrong, capsys):
    assert main(["eval", *wrong]) == 2
    assert "hypermlp eval:" in capsys.readouterr().err


def test_marks_of_a_tokenizer_are_no_text(checkpoints, tmp_path):
    """Tokenizers that put a token before or behind every text give the same bits per byte."""
    plain = scores(checkpoints / "gpt2")["bits per byte"]
    tokenizer = build_tokenizer("bytes", [])
    end = tokenizer.eos_token
    marks = TemplateProcessing(single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = marks
    save(GPT2LMHeadModel.from_pretrained(checkpoints / "gpt2"), tokenizer, tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)("ab")["input_ids"]) == 4
    assert scores(tmp_path)["bits per byte"] == pytest.approx(plain, rel=1e-6)


def damaged(folder, what):
    """Save a checkpoint with one thing wrong and return its folder."""
    context, size = 32 if what == "context" else 128, 100 if what == "tokenizer" else 257
    model, tokenizer = byte_model(max_position_embeddings=context, vocab_size=size)
    if what == "numbers":
        torch.nn.init.constant_(model.model.layers[0].mixer.v_proj.weight, torch.nan)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if what == "tensor":
        kept = {name: x for name, x in load_file(weights).items() if "v_proj" not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    if what == "file":
        weights.write_bytes(weights.read_bytes()[:100])
    if what != "no tokenizer":
        save_tokenizer(tokenizer, folder)
    return folder


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tensor", "lacks model.layers.0.mixer.v_proj.weight: it is not whole"),
        ("numbers", "not finite, first in model.layers.0.mixer.v_proj.weight"),
        ("tokenizer", "its tokenizer has 257 tokens, its model 100"),
        ("context", "questions need 64 tokens at least"),
        ("file", "cannot be evaluated"),
        ("no tokenizer", "cannot be evaluated"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, what, said, capsys):
    assert main(["eval", str(damaged(tmp_path / "damaged", what))]) == 2
    message = capsys.readouterr().err
    assert "damaged cannot be evaluated" in message
    assert said in message


def test_a_failure_keeps_what_went_before(checkpoints, tmp_path, capsys):
    later = damaged(tmp_path / "damaged", "numbers")
    assert main(["eval", str(checkpoints / "ours"), str(later), "--limit", "2"]) == 2
    assert "| bits per byte |" in capsys.readouterr().out
    assert main(["eval", str(checkpoints / "ours"), str(tmp_path)]) == 2, "nothing is run"
    assert "bits per byte" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "lm_eval"], ["-m", "hypermlp.evals.harness"]])
def test_the_harness_own_program_knows_the_model(checkpoints, program):
    model = ["--model", "hypermlp", "--model_args", f"pretrained={checkpoints / 'ours'}"]
    options = ["--tasks", str(suites.TASKS), "--limit", "4", "--device", "cpu"]
    command = [sys.executable, *program, *model, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hypermlp_recall" in done.stdout


@pytest.mark.slow
def test_ruler_generates_the_same_in_any_batch(tmp_path):
    save(*byte_model(mixer="S-p", max_position_embeddings=4096), tmp_path)
    alone, together = (scores(tmp_path, batch_size=size, limit=3) for size in (1, 3))
    assert together == pytest.approx(alone, rel=1e-6)
