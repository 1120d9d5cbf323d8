"""The server answers like OpenAI's API, and refuses what it cannot do with a reason."""

import json
import re
import socket
import threading
import time

import pytest
from fastapi.testclient import TestClient

from hypermlp.cli import main
from hypermlp.commands.serve import model_name
from hypermlp.serve.app import Limits, Server, _Job, build_app
from hypermlp.testing import randomise_
from tests.checkpoints import byte_model

CONTEXT = 64


@pytest.fixture(scope="module")
def server():
    model, tokenizer = byte_model(max_position_embeddings=CONTEXT)
    return Server(randomise_(model, scale=0.5), tokenizer, "tiny")


@pytest.fixture
def client(server):
    return TestClient(build_app(server))


def ask(client, **body):
    return client.post("/v1/completions", json={"prompt": "def f", "max_tokens": 8} | body)


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_completion_has_the_fields_of_openai(client):
    answer = ask(client, temperature=0).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert text_of(ask(client, model="tiny", prompt=["def f"], temperature=0)) == answer["choices"][0]["text"]


def test_the_model_is_listed_and_known_by_its_name_only(client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404
    assert ask(client, model="other").status_code == 404
    assert client.get("/health").json() == {"status": "ok"}


def test_sampling_parameters_have_an_effect(client):
    greedy = text_of(ask(client, temperature=0))
    assert text_of(ask(client, temperature=0, seed=5)) == greedy
    drawn = {seed: text_of(ask(client, temperature=1.5, seed=seed)) for seed in (1, 2, 3)}
    assert len({greedy, *drawn.values()}) == 4
    assert text_of(ask(client, temperature=1.5, seed=1)) == drawn[1]
    assert text_of(ask(client, temperature=1.5, top_p=1e-6, seed=1)) == greedy


def test_a_stop_text_ends_the_answer(client):
    whole = text_of(ask(client, temperature=0, max_tokens=12))
    stop = whole[3:5]
    answer = ask(client, temperature=0, max_tokens=12, stop=stop)
    assert text_of(answer) == whole[: whole.find(stop)]
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_stop_text_ends_the_generation(client):
    """The server reads the text up to its last space, so the model has to write one."""
    drawn = {"max_tokens": 40, "temperature": 1.5}
    texts = (text_of(ask(client, seed=seed, **drawn)) for seed in range(100))
    seed, text = next((seed, text) for seed, text in enumerate(texts) if " " in text[1:20])
    assert ask(client, seed=seed, stop=text[0], **drawn).json()["usage"]["completion_tokens"] < 40


def test_a_stream_has_the_same_text(client):
    whole = ask(client, temperature=0).json()
    lines = [line for line in ask(client, temperature=0, stream=True).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt is ''; it must be one text that is not empty"),
        ({"prompt": "x" * CONTEXT}, "64 tokens of prompt and max_tokens = 8 are too many"),
        ({"prompt": "x" * 100_000}, "the prompt has 100000 characters"),
        ({"prompt": [1, 2]}, "prompt is [1, 2]"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, 1 or more"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"seed": 10**30}, "seed is 1000"),
        ({"temperature": -1}, "temperature is -1; it must be 0, or between"),
        ({"temperature": 1e-300}, "temperature is 1e-300"),
        ({"top_p": 0}, "top_p is 0"),
        ({"stop": [""]}, "stop is ['']"),
        ({"n": 2}, "n is 2, which is not supported"),
        ({"logprobs": 3}, "logprobs is 3, which is not supported"),
        ({"echo": True}, "echo is True, which is not supported"),
        ({"temprature": 1}, "unknown parameter 'temprature' (did you mean 'temperature'?)"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused_with_the_reason(client, body, message):
    answer = ask(client, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["prompt", "stop"])
def test_half_a_surrogate_pair_is_refused(client, name):
    """JSON can hold it, but it is no text: it has no UTF-8."""
    body = json.dumps({"prompt": "def f"} | {name: "\ud800"}).encode()
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert re.match(rf"{name} is \[?'\\ud800'", answer.json()["error"]["message"])


def test_a_chat_is_refused_with_the_way_out(client):
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 400
    assert "/v1/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"[]", b"3"], ids=len)
def test_what_is_no_request_is_refused(client, content):
    assert client.post("/v1/completions", content=content).status_code == 400


def test_a_long_request_is_refused_before_it_is_tokenized(client, server, monkeypatch):
    monkeypatch.setattr(server, "tokenizer", None)
    answer = client.post("/v1/completions", json={"prompt": "x" * 2**24})
    assert answer.status_code == 413


@pytest.fixture
def slow(server, monkeypatch):
    """An event: the generation of the server waits until it is set."""
    free = threading.Event()
    generate = server.model.generate

    def wait(*args, **kwargs):
        assert free.wait(60)
        return generate(*args, **kwargs)

    monkeypatch.setattr(server.model, "generate", wait)
    return free


def test_only_so_many_requests_wait(server, slow, monkeypatch):
    monkeypatch.setattr(server, "limits", Limits(waiting=1))
    with TestClient(build_app(server)) as client:
        answers = []
        first = threading.Thread(target=lambda: answers.append(ask(client)))
        first.start()
        while server.waiting == 0:
            time.sleep(0.01)
        assert ask(client).status_code == 503
        slow.set()
        first.join()
        assert answers[0].status_code == 200
        assert ask(client).status_code == 200


@pytest.mark.parametrize(("body", "status"), [({}, 200), ({"max_tokens": CONTEXT}, 400)], ids=str)
def test_a_place_is_free_before_the_answer_is_sent(client, server, monkeypatch, body, status):
    """Otherwise a client that asks again at once may be refused."""
    waiting, send = [], _Job.send

    def record(job, piece):
        if not isinstance(piece, str):
            waiting.append(server.waiting)
        send(job, piece)

    monkeypatch.setattr(_Job, "send", record)
    assert ask(client, **body).status_code == status
    assert waiting == [0]


def test_a_request_that_takes_too_long_ends(server, slow, monkeypatch):
    monkeypatch.setattr(server, "limits", Limits(seconds=0.05))
    threading.Timer(0.2, slow.set).start()
    assert ask(TestClient(build_app(server))).status_code == 504


def test_a_failing_generation_is_an_error_of_the_server(server, client, monkeypatch):
    monkeypatch.setattr(server.model, "generate", lambda **_: 1 / 0)
    assert ask(client).status_code == 500


def test_a_failure_in_a_stream_is_its_last_event(server, client, monkeypatch):
    def fail(streamer, **_):
        streamer.on_finalized_text("begun")
        raise ZeroDivisionError

    monkeypatch.setattr(server.model, "generate", fail)
    first, last = (json.loads(line[6:]) for line in ask(client, stream=True).text.strip().split("\n\n"))
    assert first["choices"][0]["text"] == "begun"
    assert "the generation failed" in last["error"]["message"]


@pytest.mark.parametrize(
    "command", [["serve", "nowhere"], ["eval", "nowhere"], ["mad", "run", "--mixer", "S"]]
)
@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_without_values_is_refused_before_any_work(command, device, capsys):
    assert main([*command, "--device", device]) == 2
    assert f"--device is '{device}', which is not usable here" in capsys.readouterr().err


def test_an_address_that_cannot_be_had_is_refused_before_the_model_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "nowhere", "--host", "127.0.0.1", "--port", str(port)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"--host is '127.0.0.1' and --port is {port}, which cannot be used" in shown.err
    assert main(["serve", "nowhere", "--host", "no.such.host.invalid"]) == 2
    assert "--host is 'no.such.host.invalid'" in capsys.readouterr().err


def test_a_model_has_the_name_of_its_run(tmp_path):
    for place in ("demo", "demo/final", "demo/checkpoint-20"):
        assert model_name(str(tmp_path / place)) == "demo"
