"""The server: it checks a request, waits for its turn, generates, and answers whole or piece by piece.

One model generates for one request at a time, in a thread of its own. Requests that wait are limited in
number and in time, and their size is checked before they are tokenized.
"""

import asyncio
import dataclasses
import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from hypermlp.errors import UserError
from hypermlp.serve.request import Completion, parse_completion

NO_CHAT = "the model has no chat template: it continues texts. Send the text as the prompt of /v1/completions"
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may take."""

    bytes: int = 2**20
    """Size of a request's body."""
    waiting: int = 32
    """Requests that wait or run at a time."""
    seconds: float = 300.0
    """Time from a request's arrival to its last token."""


class HttpError(Exception):
    """An answer with a status that is no success."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class _Job(TextStreamer, StoppingCriteria):
    """One generation: it receives the text, and stops at its deadline or when the client is gone."""

    def __init__(self, server: "Server", request: Completion, deadline: float):
        super().__init__(server.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.request, self.deadline = request, deadline
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[str | Exception | None]()
        self.cancelled = threading.Event()
        self.prompt_tokens = self.generated = 0
        self.text, self.sent = "", 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        late = self.cancelled.is_set() or time.monotonic() > self.deadline or self._end() is not None
        return torch.full((input_ids.shape[0],), late, device=input_ids.device, dtype=torch.bool)

    def _end(self) -> int | None:
        """Return where the first stop text begins; None if there is none yet."""
        places = [place for place in map(self.text.find, self.request.stop) if place >= 0]
        return min(places, default=None)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Send on what cannot be the beginning of a stop text."""
        self.text += text
        end, longest = self._end(), max(map(len, self.request.stop), default=1)
        ready = end if end is not None else len(self.text) if stream_end else len(self.text) - longest + 1
        if ready > self.sent:
            self.send(self.text[self.sent : ready])
            self.sent = ready

    def send(self, piece: str | Exception | None) -> None:
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def received(self) -> AsyncIterator[str]:
        """Yield the pieces of the text as they come; raise the error that ended the generation."""
        while (piece := await self.pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    @property
    def finish_reason(self) -> str:
        return "length" if self.generated >= self.request.max_tokens and self._end() is None else "stop"

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
        }


class Server:
    """A model with its tokenizer, its name, and the requests that wait for it."""

    def __init__(self, model: Any, tokenizer: Any, name: str, limits: Limits | None = None):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.limits = limits or Limits()
        self.context = model.config.max_position_embeddings
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self.lock = threading.Lock()
        self.waiting, self.created = 0, int(time.time())

    def description(self) -> dict[str, Any]:
        """Return the entry of the model in the list of models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "hypermlp"}

    async def read(self, request: Request) -> Any:
        """Return the JSON of a request; raise HttpError if it is too long, too slow or no JSON."""
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > self.limits.bytes:
                        raise HttpError(
                            413, f"the request is longer than {self.limits.bytes} bytes; shorten it"
                        )
            return json.loads(content)
        except TimeoutError as error:
            raise HttpError(
                408, f"the request took longer than {self.limits.seconds:g} s to arrive"
            ) from error
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error

    async def complete(self, request: Request) -> Any:
        """Answer a request for a completion."""
        began, body = time.monotonic(), await self.read(request)
        completion = parse_completion(body)
        if body.get("model") not in (None, self.name):
            raise HttpError(
                404, f"model is {body['model']!r}; this server has {self.name!r}, or leave it out"
            )
        if len(completion.prompt) > self.context * self.longest_token:
            raise UserError(
                f"the prompt has {len(completion.prompt)} characters, more than {self.context} tokens, the "
                "model's context, can hold; shorten it"
            )
        if self.waiting >= self.limits.waiting:
            raise HttpError(503, f"{self.waiting} requests are waiting already; try again later")
        job = _Job(self, completion, began + self.limits.seconds)
        with self.lock:
            self.waiting += 1
        self.thread.submit(self._generate, job)
        key = f"cmpl-{uuid.uuid4().hex}"
        pieces = job.received()
        first = await anext(pieces, "")  # an error must become a status, so wait for the first piece
        if completion.stream:
            return StreamingResponse(self._stream(key, job, first, pieces), media_type="text/event-stream")
        text = first + "".join([piece async for piece in pieces])
        return self._chunk(key, text, job.finish_reason) | {"usage": job.usage()}

    async def _stream(self, key: str, job: _Job, first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            if first:
                yield f"data: {json.dumps(self._chunk(key, first, None))}\n\n"
            async for piece in rest:
                yield f"data: {json.dumps(self._chunk(key, piece, None))}\n\n"
            end = self._chunk(key, "", job.finish_reason) | {"usage": job.usage()}
            yield f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n"
        except (UserError, HttpError) as error:
            yield f"data: {json.dumps(error_body(str(error)))}\n\n"
        finally:
            job.cancelled.set()  # the client may be gone

    def _chunk(self, key: str, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}
        head = {"id": key, "object": "text_completion", "created": int(time.time()), "model": self.name}
        return head | {"choices": [choice]}

    def _generate(self, job: _Job) -> None:
        """Generate in the model's thread, free the job's place, then put the outcome into its queue.

        The place is free before the client has the answer, so that its next request is not refused.
        """
        outcome: Exception | None = None
        try:
            self._run(job)
            if time.monotonic() > job.deadline:
                outcome = HttpError(
                    504, f"the request took longer than {self.limits.seconds:g} s; ask for less"
                )
        except (UserError, HttpError) as error:
            outcome = error
        except Exception:
            logger.exception("a generation failed")
            outcome = HttpError(500, "the generation failed; the server's log has the reason")
        with self.lock:
            self.waiting -= 1
        job.send(outcome)

    @torch.inference_mode()
    def _run(self, job: _Job) -> None:
        request = job.request
        if time.monotonic() > job.deadline or job.cancelled.is_set():
            return
        inputs = self.tokenizer(request.prompt, return_tensors="pt", add_special_tokens=False, verbose=False)
        job.prompt_tokens = inputs["input_ids"].shape[1]
        if job.prompt_tokens + request.max_tokens > self.context:
            raise UserError(
                f"{job.prompt_tokens} tokens of prompt and max_tokens = {request.max_tokens} are too many; "
                f"the model's context has {self.context}"
            )
        if request.seed is not None:
            torch.manual_seed(request.seed)
        out = self.model.generate(
            **inputs.to(self.model.device),
            **request.settings(),
            streamer=job,
            stopping_criteria=StoppingCriteriaList([job]),
            max_new_tokens=request.max_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        job.generated = out.shape[1] - job.prompt_tokens


def error_body(message: str) -> dict[str, Any]:
    """Return the JSON of an error, as in OpenAI's API."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def build_app(server: Server) -> FastAPI:
    """Return the web application of a server."""
    app = FastAPI(title=f"hypermlp: {server.name}", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HttpError)
    async def refuse(_request: Request, error: HttpError) -> JSONResponse:
        return JSONResponse(error_body(str(error)), error.status)

    @app.exception_handler(UserError)
    async def explain(_request: Request, error: UserError) -> JSONResponse:
        return JSONResponse(error_body(str(error)), 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.description()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != server.name:
            raise HttpError(404, f"model is {name!r}; this server has {server.name!r}")
        return server.description()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await server.complete(request)

    @app.post("/v1/chat/completions")
    async def chat() -> None:
        raise HttpError(400, NO_CHAT)

    return app
