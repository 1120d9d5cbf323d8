"""The server with malformed requests: no status 500, no hang, no lost server.

One server is started on a free port of 127.0.0.1 with a tiny model. Requests are written to sockets as bytes,
so that they can be wrong in every layer: the line, the headers, the body, the JSON, the values.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz import isolated
from fuzz.core import Case, Finding, Part, die_with_parent, environment
from fuzz.fixtures import Fixtures

PATHS = (
    *("/v1/completions",) * 12,
    *("/v1/chat/completions",) * 2,
    "/v1/models",
    "/health",
    "/",
    "/v1/responses",
    "/v1/embeddings",
    "/nonsense",
    "/v1/completions/../..",
    "/%00",
    "/load_model",
)
METHODS = ("POST",) * 16 + ("GET", "GET", "PUT", "DELETE", "PATCH", "NONSENSE", "", "GET /x")
FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "stream",
    "stop",
    "n",
    "logprobs",
    "messages",
    "echo",
    "suffix",
    "best_of",
    "logit_bias",
    "frequency_penalty",
    "generation_config",
)
VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    10**30,
    -(10**30),
    1e308,
    1e-300,
    0.5,
    "",
    "nonsense",
    "\x00",
    "é🙂\u202e",
    "x" * 3000,
    [],
    [[]],
    [1, 2],
    ["a", "b"],
    {},
    {"a": 1},
    [None],
    "NaN",
    "../../etc/passwd",
    [{"role": "user", "content": "hi"}],
    [{"role": 5}],
    [{"role": "user", "content": None}],
)
BROKEN = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"{}",
    b"\xff\xfe",
    b"{'a': 1}",
    b'{"prompt": NaN}',
    b"[" * 3000,
    b'{"prompt": "a", "prompt": 5}',
    b'{"prompt": 1e999}',
    b'{"prompt": "\\ud800"}',
    b"\x00" * 100,
)
HEADERS = (
    "Content-Type: text/plain",
    "Content-Type: nonsense",
    "Content-Length: -5",
    "Content-Length: abc",
    "Content-Length: 99999999999999",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    "X: " + "y" * 9000,
    "no colon here",
    "Authorization: Bearer x",
    "Connection: upgrade",
    "Content-Encoding: gzip",
)
ANSWER_SECONDS = 45.0
BODY = {"prompt": "hello", "max_tokens": 2}


class Serving(Part):
    name = "serving"
    limit = 300.0

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.server: subprocess.Popen | None = None
        self.port = 0

    def close(self):
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
        self.server = None
        isolated.close()

    def draw(self, rng: random.Random) -> Case:
        case: Case = {"method": rng.choice(METHODS), "path": rng.choice(PATHS), "headers": [], "cut": None}
        if rng.random() < 0.25:
            case["headers"] = [rng.choice(HEADERS)]
        if rng.random() < 0.1:
            case["cut"] = rng.random()
        if rng.random() < 0.2:
            case["raw"] = rng.choice(BROKEN).decode("latin-1")
        else:
            fields = rng.sample(FIELDS, rng.choice((0, 1, 1, 1, 2, 3)))
            case["body"] = BODY | {field: rng.choice(VALUES) for field in fields}
            if rng.random() < 0.1:
                case["body"].pop(rng.choice(("prompt", "max_tokens")))
        return case

    def smaller(self, case):
        yield case | {"headers": [], "cut": None}
        for field in case.get("body", {}):
            yield case | {"body": {name: x for name, x in case["body"].items() if name != field}}
        yield case | {"method": "POST", "path": "/v1/completions"}

    def check(self, case):
        self._start()
        data = request_bytes(case)
        try:
            status, answer = self._send(data, case["cut"])
        except TimeoutError as error:
            raise Finding("no answer", f"{data[:500]!r}") from error
        if status >= 500:
            raise Finding(f"status {status} at {case['path']}", f"{data[:700]!r}\n{answer[:700]!r}")
        if status == 0:  # the server closed the connection, and may be about to end
            time.sleep(0.2)
        if self.server is None or self.server.poll() is not None:
            raise Finding("the server ended", f"{data[:500]!r}")
        return Counter({f"status {status // 100}xx" if status else "connection closed": 1})

    def _start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""
        if self.server is not None and self.server.poll() is None:
            return
        fixtures = Fixtures(self.folder / "fixtures")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [
            "serve",
            str(fixtures.run),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--device",
            "cpu",
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "hypermlp", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        good = request_bytes({"method": "POST", "path": "/v1/completions", "headers": [], "body": BODY})
        for _ in range(240):
            try:
                if self._send(good, None)[0] == 200:
                    return
            except OSError:
                pass
            if self.server.poll() is not None:
                break
            time.sleep(0.5)
        raise Finding("the server does not start", (self.folder / "server.log").read_text()[-2000:])

    def _send(self, data: bytes, cut: float | None) -> tuple[int, bytes]:
        """Send bytes, all or the first part of them, and return the status of the answer, 0 for none."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS) as connection:
            if cut is not None:
                connection.sendall(data[: int(cut * len(data))])
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.sendall(data)
            incomplete = cut is not None or b"Content-Length: 99" in data or b"chunked" in data
            if incomplete:
                connection.settimeout(2.0)
            try:
                answer = connection.recv(4096)
            except ConnectionError:
                return 0, b""
            except TimeoutError:
                if incomplete:
                    return 0, b""
                raise
        words = answer.split(maxsplit=2)
        return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), answer


def request_bytes(case: Case) -> bytes:
    """Return a request as bytes."""
    body = case["raw"].encode("latin-1") if "raw" in case else json.dumps(case["body"]).encode()
    headers = ["Host: 127.0.0.1", "Connection: close", *case["headers"]]
    given = " ".join(case["headers"])
    headers += ["Content-Type: application/json"] if "Content-Type" not in given else []
    headers += [f"Content-Length: {len(body)}"] if "Content-Length" not in given else []
    head = "\r\n".join([f"{case['method']} {case['path']} HTTP/1.1", *headers, "", ""])
    return head.encode() + body
