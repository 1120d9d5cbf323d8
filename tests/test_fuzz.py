"""Each fuzzer runs for a moment without a finding, and finds a mistake that is planted in what it tests."""

import http.server
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import core, isolated, search, serving
from fuzz.commands import Commands
from fuzz.damage import Damage
from fuzz.decoding import Decoding
from fuzz.fixtures import Fixtures, command_problem
from fuzz.kills import Kills
from fuzz.layers import Layers
from fuzz.operators import Operators
from fuzz.search import ROUND, Search
from fuzz.watched import Watched

from hypermlp.layers.state import DecodingState
from hypermlp.ops import blocked, dispatch
from hypermlp.ops.dispatch import BACKENDS

pytestmark = pytest.mark.thorough
SEED = "7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose fixtures (a trained run) all parts of this file share; commands are offline."""
    path = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in core.ENVIRONMENT.items():
            patched.setenv(name, value)
        Fixtures(path / "fixtures")  # starts the server of ``isolated``, which keeps the environment
    return path


@pytest.fixture
def unreduced(monkeypatch):
    """Findings are not reduced, which takes time."""
    monkeypatch.setattr(search, "SHRINK_SECONDS", 0.0)


def found(part, folder, cases):
    """Return the first finding among some cases, or None."""
    own = part(folder)
    search = Search(part, own.check, SEED, folder)
    try:
        rounds = (search.round(number, min(ROUND, cases)) for number in range(-(-cases // ROUND)))
        return next(filter(None, rounds), None)
    finally:
        own.close()


@pytest.mark.parametrize(
    ("part", "cases"),
    [
        (Operators, 30),
        (Layers, 20),
        (Decoding, 25),
        (Commands, 10),
        (Damage, 4),
        (Kills, 2),
        (serving.Serving, 8),
    ],
)
def test_smoke(part, cases, folder):
    assert found(part, folder, cases) is None


def perturbed(monkeypatch, name, change):
    """Replace a backend's operator by one whose result ``change`` alters."""
    good = BACKENDS[name]
    wrong = dispatch.Backend(
        **{**vars(good), "attention": lambda arguments: change(good.attention(arguments))}
    )
    monkeypatch.setitem(BACKENDS, name, wrong)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: out * (1 + 3e-10), id="factor"),
        pytest.param(lambda out: torch.cat([out[:, :-1], out[:, -1:] * 1.01], dim=1), id="last query"),
        pytest.param(lambda out: out.masked_fill(out == out.max(), torch.nan), id="NaN"),
        pytest.param(lambda out: out + (out - out.detach()) * 0.01, id="gradient only"),
    ],
)
def test_a_perturbed_operator_is_found(monkeypatch, tmp_path, unreduced, change):
    perturbed(monkeypatch, "blocked", change)
    assert "blocked" in found(Operators, tmp_path, 25).kind


def test_a_wrong_gradient_of_a_layer_is_found(monkeypatch, tmp_path, unreduced):
    good = blocked.backward

    def wrong(*args, **kwargs):
        first, *rest = good(*args, **kwargs)
        return (first * 1.001, *rest)

    monkeypatch.setattr(blocked, "backward", wrong)
    perturbed(monkeypatch, "blocked", lambda out: out + (out - out.detach()) * 0.001)
    assert found(Layers, tmp_path, 60).kind == "wrong gradient of a layer"


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("crop", lambda self, length: self),
        ("detach", lambda self: self._change(lambda x: x * 1.001 if x.is_floating_point() else x)),
        ("_select", lambda self, index: self._change(lambda x: x[: index.numel()])),
        ("clone", lambda self: self),
    ],
)
def test_a_wrong_decoding_state_is_found(monkeypatch, tmp_path, unreduced, method, wrong):
    monkeypatch.setattr(DecodingState, method, wrong)
    assert found(Decoding, tmp_path, 80) is not None


def test_a_finding_is_reduced_and_can_be_replayed(monkeypatch, tmp_path, capsys):
    part = Operators(tmp_path)
    perturbed(monkeypatch, "blocked", lambda out: out * 1.5)
    finding = Search(Operators, part.check, SEED, tmp_path).round(0, 5)
    (path,) = (tmp_path / "findings").iterdir()
    record = json.loads(path.read_text())
    assert f"python -m fuzz replay {path}" in capsys.readouterr().out
    assert record["kind"] == finding.kind
    assert record["case"]["queries"] <= 2
    assert core.failure(part.check, record["case"]).kind == finding.kind
    again = Search(Operators, part.check, "another seed", tmp_path).round(0, 1)
    assert again.kind == finding.kind, "Hypothesis' database has the case"
    monkeypatch.undo()
    assert not isinstance(core.failure(part.check, record["case"]), core.Finding)


ENDING = """
import os, time
from collections import Counter
from hypothesis import strategies as st
from fuzz.core import Part

class Ending(Part):
    name, limit = "ending", 3.0
    def cases():
        return st.fixed_dictionaries({"number": st.integers(0, 100)})
    def check(self, case):
        if case["number"] >= 30:
            os.abort()
        if case["number"] == 7:
            time.sleep(60)
        return Counter()
"""


def test_a_crash_and_a_hang_are_findings(monkeypatch, tmp_path):
    (tmp_path / "ending.py").write_text(ENDING)
    monkeypatch.syspath_prepend(tmp_path)
    from ending import Ending

    watched = Watched(Ending, tmp_path)
    try:
        assert Search(Ending, watched.check, SEED, tmp_path).round(0, 30).kind == "crash, SIGABRT"
        (path,) = (tmp_path / "findings").iterdir()
        assert json.loads(path.read_text())["case"] == {"number": 30}
        assert core.failure(watched.check, {"number": 7}).kind == "hang"
        assert core.failure(watched.check, {"number": 8}) == {}, "a new process goes on after it"
    finally:
        watched.close()


def test_wrong_ends_of_commands_are_found(folder, tmp_path):
    run, recipe = str(folder / "fixtures" / "run"), str(folder / "fixtures" / "tiny.yaml")
    good = isolated.run(["flops", recipe], tmp_path / "a")
    assert command_problem("flops", good, refused=False) is None
    assert command_problem("flops", good, refused=True)[0] == "an invalid value was accepted"
    bad = isolated.run(["sample", run, "--tokens", "0"], tmp_path / "b")
    assert command_problem("sample", bad, refused=True) is None
    assert command_problem("sample", bad._replace(status=-11), refused=True)[0] == "ended by signal 11"
    assert command_problem("sample", bad._replace(status=isolated.TRACEBACK), refused=True)
    assert command_problem("sample", bad._replace(err="oops"), refused=True)[0] == "no message of one line"
    slow = isolated.run(["train", recipe, "--set", "training.steps=100000"], tmp_path / "c", seconds=3)
    assert command_problem("train", slow, refused=False)[0] == "no end"


def test_accepted_damage_is_found(monkeypatch, folder):
    part = Damage(folder)
    case = {
        "what": "run",
        "command": ["sample", "RUN", "hello", "--tokens", "2"],
        "damages": [
            {"file": 0, "name": "model.safetensors", "way": "splice"}
            | {"begin": 0.9, "removed": 1, "new": "?"}
        ],
    }
    accepted = isolated.Result(0, "hello", "", 0.0)
    monkeypatch.setattr(isolated, "run", lambda *args, **settings: accepted)
    monkeypatch.setattr("fuzz.damage.MODEL_FILES", ("model.safetensors",))
    seen = [
        core.failure(part.check, case | {"damages": [case["damages"][0] | {"file": i}]}) for i in range(8)
    ]
    assert "sample accepted damaged weights" in [getattr(finding, "kind", None) for finding in seen]


class Wrong(http.server.BaseHTTPRequestHandler):
    """Answers as the prompt says: with status 500, not at all, or with the end of the process."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        what = json.loads(body)["prompt"]
        if what == "end":
            os._exit(3)
        if what == "wait":
            time.sleep(60)
        self.send_response(500 if what == "fail" else 400)
        self.end_headers()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_wrong_answers_of_a_server_are_found(monkeypatch, tmp_path):
    """A server that answers 500, not at all, or ends is found; a plain one passes."""
    part = serving.Serving(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wrong)
    part.port = server.server_port
    part.server = multiprocessing.get_context("fork").Process(target=server.serve_forever)
    part.server.start()
    server.server_close()
    monkeypatch.setattr(serving, "ANSWER_SECONDS", 1.0)

    def kind(prompt):
        case = {"method": "POST", "path": "/v1/completions", "headers": [], "cut": None}
        return getattr(core.failure(part.check, case | {"body": {"prompt": prompt}}), "kind", None)

    try:
        assert kind("hello") is None
        assert kind("fail") == "status 500 at /v1/completions"
        assert kind("wait") == "no answer"
        assert kind("end") == "the server ended"
    finally:
        part.server.kill()
        part.server.join()


def test_a_training_that_loses_its_place_is_found(monkeypatch, folder):
    """Replace the file of weights by a shorter one as soon as a training was ended."""
    part, case = Kills(folder), {"kills": [[0.1, "SIGKILL"]]}
    run = isolated.run

    def wrong(words, place, **settings):
        result = run(words, place, **settings)
        weights = Path(words[3]) / "final" / "model.safetensors"
        if "uninterrupted" not in words[3] and weights.exists():
            weights.write_bytes(weights.read_bytes()[:-1])
        return result

    assert not isinstance(core.failure(part.check, case), core.Finding)
    monkeypatch.setattr(isolated, "run", wrong)
    assert core.failure(part.check, case).kind == "a resumed training has other weights"


@pytest.mark.slow
def test_the_program_runs_all_parts(tmp_path):
    """The program runs every part and ends with a summary; ``make fuzz`` judges the findings."""
    words = ["run", "--minutes", "10", "--cases", "2", "--lanes", "1", "--out", str(tmp_path)]
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, "-m", "fuzz", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(part["counted"]["cases"] == 2 for part in summary["parts"].values())
