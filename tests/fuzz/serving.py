"""The server with malformed requests: no status 500, no hang, no lost server.

One server is started on a free port of 127.0.0.1 with a tiny model. Requests are written to sockets as bytes,
so that they can be wrong in every layer: the line, the headers, the body, the JSON, the values.
"""

import json
import socket
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

from hypothesis import strategies as st

from fuzz import isolated
from fuzz.core import Case, Finding, Part
from fuzz.drawing import ODD_JSON, drawn_from, once_in
from fuzz.fixtures import Fixtures
from hypermlp.serve.request import NEUTRAL, READ

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
FIELDS = (*READ, *NEUTRAL, "messages", "generation_config")
MESSAGES = ([{"role": "user", "content": "hi"}], [{"role": 5}], [{"role": "user", "content": None}])
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


@st.composite
def requests(draw) -> Case:
    case: Case = {
        "method": draw(st.sampled_from(METHODS)),
        "path": draw(st.sampled_from(PATHS)),
        "headers": [draw(st.sampled_from(HEADERS))] if draw(once_in(4)) else [],
        "cut": draw(st.floats(0, 1)) if draw(once_in(10)) else None,
    }
    if draw(once_in(5)):
        return case | {"raw": draw(st.sampled_from(BROKEN)).decode("latin-1")}
    values = drawn_from(ODD_JSON, ODD_JSON, st.sampled_from(MESSAGES))
    case["body"] = BODY | draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
    if draw(once_in(10)):
        case["body"].pop(draw(st.sampled_from(("prompt", "max_tokens"))))
    return case


class Serving(Part):
    name = "serving"
    limit = 300.0

    cases = requests
    share = 5
    enough = 2_200

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.server: BaseProcess | None = None
        self.port = 0

    def close(self):
        if self._runs():
            isolated.end(self.server)
            self.server.join()
        self.server = None

    def _runs(self) -> bool:
        return self.server is not None and self.server.exitcode is None

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
        if not self._runs():
            raise Finding("the server ended", f"{data[:500]!r}")
        return Counter({f"status {status // 100}xx" if status else "connection closed": 1})

    def _start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""
        if self._runs():
            return
        fixtures = Fixtures(self.folder / "fixtures")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["serve", str(fixtures.run), "--host", "127.0.0.1", "--port", str(self.port)]
        self.server = isolated.start([*words, "--device", "cpu"], self.folder / "server")
        good = request_bytes({"method": "POST", "path": "/v1/completions", "headers": [], "body": BODY})
        for _ in range(240):
            try:
                if self._send(good, None)[0] == 200:
                    return
            except OSError:
                pass
            if not self._runs():
                break
            time.sleep(0.5)
        raise Finding("the server does not start", (self.folder / "server" / ".stderr").read_text()[-2000:])

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
