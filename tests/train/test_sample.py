"""Text from a run: by the command, the pipeline and the server."""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from transformers import pipeline

import hypermlp.models  # noqa: F401 - registers with the Auto classes
from hypermlp.cli import main
from hypermlp.train.recipe import load_recipe
from hypermlp.train.run import train

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def run(recipe_of_module):
    folder = recipe_of_module.with_name("run")
    train(load_recipe(str(recipe_of_module)), folder)
    return folder


@pytest.mark.parametrize("place", ["", "final", "checkpoint-6"])
def test_sample_continues_a_prompt(run, capsys, place):
    arguments = ["sample", str(run / place), "document 1", "--tokens", "20", "--seed", "3"]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert first.out.startswith("document 1")
    assert len(first.out) > len("document 1\n")
    assert "tokens/s" in first.err
    assert main(arguments) == 0
    assert capsys.readouterr().out == first.out


def test_sample_from_standard_input_and_from_nothing(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"document")))
    assert main(["sample", str(run), "-", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("document")
    assert main(["sample", str(run), "--tokens", "5"]) == 0
    assert main(["sample", str(run), "--tokens", "5", "options stand anywhere"]) == 0
    assert "<|endoftext|>" not in capsys.readouterr().out


def test_sample_reports_mistakes(tmp_path, run, capsys):
    assert main(["sample", str(tmp_path)]) == 2
    assert "has no model; allowed: a folder of save_pretrained" in capsys.readouterr().err
    (tmp_path / "recipe.json").write_text("{}")
    assert main(["sample", str(tmp_path)]) == 2
    assert "has no checkpoint: a training saves one after" in capsys.readouterr().err
    assert main(["sample", str(run), "ab\udcff"]) == 2
    assert "the prompt is not UTF-8" in capsys.readouterr().err
    assert main(["sample", str(run), "x", "--tokens", "0"]) == 2
    assert main(["sample", str(run), "x", "--tokens", "1000"]) == 2
    assert "the model's context has 32" in capsys.readouterr().err


def damaged(run, tmp_path, file, content):
    folder = tmp_path / "damaged"
    shutil.copytree(run / "final", folder)
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / file).read_text()) | content).encode()
    (folder / file).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"\0" * 100, "the weights in .* cannot be loaded"),
        ("config.json", {"hidden_size": 64, "intermediate_size": 256}, "the weights in .* cannot be loaded"),
        ("config.json", {"hidden_size": 10**8}, "hidden_size \\(100000000\\)"),
        ("config.json", {"rank": 10**8}, "this machine has .* GiB. Lower .* rank \\(100000000\\)"),
        (
            "config.json",
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 10{12}; it must be a positive integer, at most",
        ),
        ("config.json", {"hidden_size": "wide"}, "config.json is not the configuration of a model"),
        ("tokenizer.json", {"padding": "x"}, "the tokenizer in .* cannot be loaded"),
        ("tokenizer_config.json", b"{", "the tokenizer in .* cannot be loaded"),
        ("generation_config.json", {"num_beams": -3}, "generation_config.json cannot be used: .*num_beams"),
        (
            "generation_config.json",
            {"eos_token_id": 1e308},
            "eos_token_id is 1e.308; it must be the",
        ),
    ],
    ids=str,
)
def test_sample_names_the_damaged_file(run, tmp_path, capsys, file, content, message):
    folder = damaged(run, tmp_path, file, content)
    capsys.readouterr()
    assert main(["sample", folder, "x", "--tokens", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(message, said)
    assert re.match(r"hypermlp sample: .*damaged", said.splitlines()[-1])


def test_sample_refuses_weights_that_differ_from_their_seal(run, tmp_path, capsys):
    weights = bytearray((run / "final" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    folder = damaged(run, tmp_path, "model.safetensors", bytes(weights))
    assert main(["sample", folder, "x", "--tokens", "2"]) == 2
    assert "model.safetensors is not what was saved" in capsys.readouterr().err
    (Path(folder) / "complete.json").unlink()  # as after an edit on purpose
    assert main(["sample", folder, "x", "--tokens", "2"]) == 0


@pytest.mark.parametrize(
    "option", [["--temperature", "nan"], ["--temperature", "1e-300"], ["--seed", str(10**30)]]
)
def test_sample_refuses_numbers_that_mean_nothing(run, capsys, option):
    assert main(["sample", str(run), "x", *option]) == 2
    assert f"{option[0]} is" in capsys.readouterr().err


def test_sample_does_not_blame_a_file_for_the_environment(run, capsys, monkeypatch):
    monkeypatch.setenv("HYPERMLP_BACKEND", "nativ")
    assert main(["sample", str(run), "x", "--tokens", "2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("hypermlp sample: unknown backend 'nativ'")


def test_extend_and_sample_beyond_the_old_context(run, tmp_path, capsys):
    longer = tmp_path / "longer"
    assert main(["extend", str(run), "--context", "64", "--out", str(longer)]) == 0
    assert "the context had 32 positions and has 64; up to 32 positions" in capsys.readouterr().out
    assert main(["sample", str(longer), "document 1", "--tokens", "50", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out) > 50


def test_sample_goes_past_the_context_with_a_window(recipe_of_module, tmp_path, capsys):
    changes = ["model.sliding_window=8", "training.steps=2", "training.save_every=2"]
    train(load_recipe(str(recipe_of_module), changes), tmp_path / "windowed")
    assert main(["sample", str(tmp_path / "windowed"), "document", "--tokens", "150", "--top-k", "5"]) == 0
    assert len(capsys.readouterr().out) > 100


def test_pipeline(run):
    write = pipeline("text-generation", model=str(run / "final"), device="cpu")
    settings = {"max_new_tokens": 8, "do_sample": False}
    together = write(["document 12: 0 12", "doc"], batch_size=2, **settings)
    assert [row[0]["generated_text"] for row in together] == [
        write(p, **settings)[0]["generated_text"] for p in ("document 12: 0 12", "doc")
    ]


def test_serve_answers_like_openai(run, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with open(tmp_path / "log", "w") as log:
        command = [
            sys.executable,
            "-m",
            "hypermlp",
            "serve",
            str(run),
            "--port",
            str(port),
            "--device",
            "cpu",
        ]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        body = {
            "model": run.name,
            "prompt": "document 1",
            "max_tokens": 5,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = None
        for _ in range(120):
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
                break
            except (ConnectionError, urllib.error.URLError):
                time.sleep(0.5)
        assert answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 5
    finally:
        server.terminate()
        server.wait(20)
