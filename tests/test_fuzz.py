"""Each fuzzer runs for a moment without a finding, and finds a mistake that is planted in what it tests."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import campaign, core, isolated, serving
from fuzz.commands import Commands
from fuzz.damage import Damage
from fuzz.decoding import Decoding
from fuzz.fixtures import Fixtures, command_problem
from fuzz.kills import Kills
from fuzz.layers import Layers
from fuzz.operators import Operators

from hypermlp.layers.state import DecodingState
from hypermlp.ops import blocked, dispatch
from hypermlp.ops.dispatch import BACKENDS

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
SEED = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose fixtures (a trained run) all parts of this file share."""
    path = tmp_path_factory.mktemp("fuzz")
    Fixtures(path / "fixtures")
    yield path
    isolated.close()


def findings(part, cases, enough=1):
    """Return the kinds of findings in the first cases, as soon as there are ``enough``."""
    found: Counter[str] = Counter()
    for i in range(cases):
        finding = core.failure(part, core.draw_case(part, SEED, i))
        found.update([finding.kind] if finding else [])
        if found.total() == enough:
            break
    return found


@pytest.mark.parametrize(("part", "cases"), [(Operators, 30), (Layers, 20), (Decoding, 25)])
def test_smoke_of_numbers(part, cases, tmp_path):
    assert findings(part(tmp_path), cases) == {}


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
def test_a_perturbed_operator_is_found(monkeypatch, tmp_path, change):
    perturbed(monkeypatch, "blocked", change)
    found = findings(Operators(tmp_path), 25)
    assert found
    assert all("blocked" in kind for kind in found)


def test_a_wrong_gradient_of_a_layer_is_found(monkeypatch, tmp_path):
    good = blocked.backward

    def wrong(*args, **kwargs):
        first, *rest = good(*args, **kwargs)
        return (first * 1.001, *rest)

    monkeypatch.setattr(blocked, "backward", wrong)
    perturbed(monkeypatch, "blocked", lambda out: out + (out - out.detach()) * 0.001)
    assert findings(Layers(tmp_path), 60)["wrong gradient of a layer"]


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("crop", lambda self, length: self),
        ("detach", lambda self: self._change(lambda x: x * 1.001 if x.is_floating_point() else x)),
        ("_select", lambda self, index: self._change(lambda x: x[: index.numel()])),
        ("clone", lambda self: self),
    ],
)
def test_a_wrong_decoding_state_is_found(monkeypatch, tmp_path, method, wrong):
    monkeypatch.setattr(DecodingState, method, wrong)
    assert findings(Decoding(tmp_path), 80)


def test_a_finding_is_shrunk_and_can_be_replayed(monkeypatch, tmp_path):
    part = Operators(tmp_path)
    perturbed(monkeypatch, "blocked", lambda out: out * 1.5)
    worker = core.Worker(
        part, SEED, report=tmp_path / "report.jsonl", mark=tmp_path / "mark", findings=tmp_path / "findings"
    )
    worker.run(first=0, stride=1, seconds=60, cases=2)
    records = [json.loads(path.read_text()) for path in (tmp_path / "findings").iterdir()]
    assert records
    assert all(record["case"]["queries"] <= 2 and record["seed"] == SEED for record in records)
    replayed = core.failure(part, records[0]["case"])
    assert replayed is not None
    assert replayed.kind == records[0]["kind"]
    monkeypatch.undo()
    assert core.failure(part, records[0]["case"]) is None


def test_a_crash_and_a_hang_are_findings(monkeypatch, tmp_path):
    class Ending(core.Part):
        name, limit = "ending", 4.0  # a busy machine needs a while to start Python

        def draw(self, rng):
            return {"index": rng.random()}

    monkeypatch.setitem(campaign.PARTS, "ending", Ending)
    job = campaign.Job("ending", 0, 1, SEED, tmp_path)
    endings = iter(("crash", "hang", "end"))
    programs = {
        "crash": "import os; open('mark', 'w').write('4'); os.abort()",
        "hang": "import time; open('mark', 'w').write('9'); time.sleep(60)",
        "end": "pass",
    }
    start = subprocess.Popen

    def popen(command, **settings):
        return start([sys.executable, "-c", programs[next(endings)]], **settings)

    monkeypatch.setattr(campaign.subprocess, "Popen", popen)
    job.run(60)
    found = job.summary()["findings"]
    assert set(found) == {"crash, SIGABRT", "hang"}
    indices = [json.loads(Path(one["files"][0]).read_text())["index"] for one in found.values()]
    assert indices == [4, 9]


@pytest.mark.parametrize(("part", "cases"), [(Commands, 10), (Damage, 4), (Kills, 1), (serving.Serving, 8)])
def test_smoke_of_processes(part, cases, folder):
    fuzzer = part(folder)
    try:
        assert findings(fuzzer, cases) == {}
    finally:
        fuzzer.close()


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
        "damages": [{"file": 0, "way": "flip", "seed": 5, "name": "model.safetensors"}],
    }
    accepted = isolated.Result(0, "hello", "", 0.0)
    monkeypatch.setattr(isolated, "run", lambda *args, **settings: accepted)
    monkeypatch.setattr("fuzz.damage.MODEL_FILES", ("model.safetensors",))
    seen = [core.failure(part, case | {"damages": [case["damages"][0] | {"file": i}]}) for i in range(8)]
    assert any(finding and finding.kind == "sample accepted damaged weights" for finding in seen)


def test_wrong_answers_of_a_server_are_found(tmp_path):
    """A server that answers 500, not at all, or ends is found; a plain one passes."""
    program = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        what = json.loads(body)["prompt"]
        if what == "end":
            os._exit(3)
        if what == "wait":
            time.sleep(60)
        self.send_response(500 if what == "fail" else 400)
        self.end_headers()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
    part = serving.Serving(tmp_path)
    part.server = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    output = part.server.stdout
    part.port = int(output.readline())
    before, serving.ANSWER_SECONDS = serving.ANSWER_SECONDS, 1.0

    def kind(prompt):
        case = {"method": "POST", "path": "/v1/completions", "headers": [], "cut": None}
        found = core.failure(part, case | {"body": {"prompt": prompt}})
        return found and found.kind

    try:
        assert kind("hello") is None
        assert kind("fail") == "status 500 at /v1/completions"
        assert kind("wait") == "no answer"
        assert kind("end") == "the server ended"
    finally:
        serving.ANSWER_SECONDS = before
        part.close()
        output.close()


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

    try:
        assert core.failure(part, case) is None
        monkeypatch.setattr(isolated, "run", wrong)
        assert core.failure(part, case).kind == "a resumed training has other weights"
    finally:
        part.close()


@pytest.mark.slow
def test_the_program_runs_all_parts(tmp_path):
    """The program runs every part and ends with a summary; ``make fuzz`` judges the findings."""
    command = [
        sys.executable,
        "-m",
        "fuzz",
        "run",
        "--minutes",
        "10",
        "--cases",
        "2",
        "--lanes",
        "1",
        "--out",
    ]
    environment = core.environment() | {"HOME": os.environ["HOME"]}
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(part["counted"]["cases"] == 2 for part in summary["parts"].values())
