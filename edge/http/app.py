"""The HTTP edge over any InferenceBackend."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from sealring.api import described
from sealring.api.answers import Asked, model_list, model_object
from sealring.api.anthropic import ask_count, ask_messages
from sealring.api.chat import ask_chat
from sealring.api.compaction import Summaries, ask_compact
from sealring.api.completions import ask_completion
from sealring.api.fields import bad, renamed
from sealring.api.ollama import VERSION, ask_ollama_chat, ask_ollama_generate, loaded, show, tags
from sealring.api.responses import ask_responses
from sealring.api.vectors import ask_embed, ask_embedding, ask_embeddings, ask_rerank
from sealring.edge.access.gate import ANY, LOOK, USE, WATCH, Door, Gate
from sealring.edge.http.answers import (
    EventStream,
    Whole,
    collect,
    count_prompt,
    together,
    unless_disconnected,
)
from sealring.edge.http.body import MAX_TEXT, BodyTurns, parse_object, read_body
from sealring.edge.http.conversation import MAX_KEPT, MAX_SOCKETS, RECEIPT, Conversation
from sealring.edge.http.guard import Guard, credential
from sealring.edge.http.paths import Path, Paths
from sealring.edge.inference.kept import KeptAnswers
from sealring.edge.inference.service import InferenceBackend
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.receipt.statement import check_nonce
from sealring.mesh.rpc.crowd import Crowd
from sealring.mesh.rpc.holding import Holding
from sealring.mesh.rpc.protocol import software_version
from sealring.v1 import inference_pb2 as inference

T = TypeVar("T")


def create_app(
    backend: InferenceBackend,
    *,
    exposition: Callable[[], bytes],
    kept: KeptAnswers | None = None,
    gate: Door | None = None,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """The ASGI application. `exposition` makes the body of /metrics; without a gate nobody needs a key.
    `kept` are answers that another edge over the same backend may have begun.

    Pages of `cors_origins` may use it from a browser.
    """
    cors = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
    )
    edge = Edge(backend, exposition, kept or KeptAnswers())
    guard = Middleware(Guard, gate=gate or Gate(), paths=PATHS, origins=cors_origins)
    return Starlette(
        routes=PATHS.routes(edge),
        middleware=[*([cors] if cors_origins else []), guard],
        exception_handlers={HTTPException: _pass_on},
    )


def _pass_on(request: Request, error: Exception) -> Response:
    """Leaves Starlette's own errors to the guard."""
    raise error


def nonce_of(value: str) -> bytes:
    """Raises InvalidInput (BAD_NONCE)."""
    try:
        nonce = bytes.fromhex(value)
    except ValueError:
        nonce = b""
    check_nonce(nonce)
    return nonce


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>sealring</title>
<body style="font: 1rem/1.5 system-ui; max-width: 40rem; margin: 2rem auto; padding: 0 1rem">
<h1>sealring</h1>
<p>A language model for programs. A client's base URL is this address with <code>/v1</code>.</p>
<ul>
<li><a href="/v1/models">/v1/models</a>: what is served</li>
<li>/v1/chat/completions, /v1/completions, /v1/responses: OpenAI</li>
<li>/v1/embeddings, /v1/rerank, /api/embed: models of vectors</li>
<li>/v1/messages: Anthropic; /api/chat, /api/generate: Ollama</li>
<li><a href="/docs">/docs</a>: all paths and their fields</li>
<li><a href="/health">/health</a>, <a href="/metrics">/metrics</a></li>
</ul>
"""


class Edge:
    """Handlers of the paths in `PATHS`."""

    def __init__(self, backend: InferenceBackend, exposition: Callable[[], bytes], kept: KeptAnswers) -> None:
        self._backend = backend
        self._exposition = exposition
        self._kept = kept
        self._turns = BodyTurns()
        self._conversations = Holding(MAX_KEPT)
        self._sockets = Crowd(MAX_SOCKETS)

    async def _read(self, request: Request, read: Callable[[dict[str, Any], str], T]) -> T:
        """What `read` makes of the body's JSON object and the request's id. Raises SealringError."""
        data = await read_body(request)
        async with self._turns.turn_of(data, request.state.charged):
            value = parse_object(data)
            if len(data) > MAX_TEXT:  # to decode images takes as long again
                await asyncio.sleep(0)
            return read(value, request.state.request_id)

    async def ask(self, request: Request, ask: Ask) -> Response:
        """Answers one API's question, which `ask` reads from the body."""
        asked, events = await self._read(
            request, lambda body, number: self._asked(request, ask, body, number)
        )
        try:
            return await self._answered(request, asked, events)
        except SealringError as error:
            raise renamed(error, asked.names) from error.__cause__

    def _asked(
        self, request: Request, ask: Ask, body: dict[str, Any], number: str
    ) -> tuple[Asked, AsyncGenerator[inference.GenerateResponse, None]]:
        """What is asked, and its answer's events. Nothing keeps the body, which has images in base64."""
        asked = ask(body, number)
        if RECEIPT in request.headers and asked.at_once:
            raise InvalidInput(
                "vectors have receipts only where inputs are sealed",
                hint="ask over `sealring proxy` or the client library, which check them",
                reason="BAD_NONCE",
                param=RECEIPT,
            )
        if RECEIPT in request.headers:
            for one in (asked.request, *asked.others):
                one.receipt.nonce = nonce_of(request.headers[RECEIPT])
        request.state.caller.claim(min(asked.choices, asked.at_once or asked.choices))
        return asked, self._load(request, asked) if asked.loads else self._answer(request, asked, body)

    async def _answered(
        self, request: Request, asked: Asked, events: AsyncGenerator[inference.GenerateResponse, None]
    ) -> Response:
        """The answer, or the stream that it comes in."""
        if asked.stream:
            stream = EventStream(events, asked, _headers)
            await stream.begin(request.receive)
            return stream
        collected = collect(events, asked.choices, request.state.share.take)
        begin, choices, finished = await unless_disconnected(request.receive, collected)
        whole = asked.render(begin).whole
        if asked.at_once:  # millions of numbers take seconds
            answer = await asyncio.to_thread(whole, choices, finished)
        else:
            answer = whole(choices, finished)
        return Whole(answer, headers=_headers(begin), media_type="application/json")

    def _answer(
        self, request: Request, asked: Asked, body: dict[str, Any]
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """A new answer, or the one that has the request's `Idempotency-Key`."""
        key = request.headers.get("idempotency-key")
        if key is None:
            return self._events(request, asked)
        text = json.dumps([request.url.path, body, request.headers.get(RECEIPT)], sort_keys=True)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        caller = request.state.caller.key_id or ""
        return self._kept.events(caller, key, digest, lambda: self._events(request, asked))

    def _events(self, request: Request, asked: Asked) -> AsyncGenerator[inference.GenerateResponse, None]:
        key_id = request.state.caller.key_id or ""
        parts = [
            self._backend.generate(one, key=key_id or asked.user, tenant=key_id)
            for one in (asked.request, *asked.others)
        ]
        return together(parts, asked.request.choices, asked.at_once) if asked.others else parts[0]

    async def _load(self, request: Request, asked: Asked) -> AsyncGenerator[inference.GenerateResponse, None]:
        """The answer to a request that asks for no more than the model: it begins when the model is there."""
        wish, tenant = asked.request, request.state.caller.key_id or ""
        keep_alive = wish.keep_alive if wish.HasField("keep_alive") else None
        await self._backend.load_model(wish.model, keep_alive, tenant=tenant)
        begin = inference.Started(request_id=wish.request_id, model=wish.model)
        yield inference.GenerateResponse(started=begin)
        yield inference.GenerateResponse(finished=inference.Finished())

    async def count(self, request: Request) -> Response:
        """Counts the tokens of a prompt."""
        asked = await self._read(request, ask_count)
        async with contextlib.aclosing(self._events(request, asked)) as events:
            tokens = await unless_disconnected(request.receive, count_prompt(events))
        return _json({"input_tokens": tokens})

    async def respond(self, request: Request) -> Response:
        """Answers in the form of Responses."""
        opens, continued = _summaries(request).open, getattr(request.state, "continued", None)
        return await self.ask(
            request, functools.partial(ask_responses, open_summary=opens, continued=continued)
        )

    async def compact(self, request: Request) -> Response:
        """Answers with a summary of a conversation."""
        return await self.ask(request, functools.partial(ask_compact, summaries=_summaries(request)))

    async def converse(self, socket: WebSocket) -> None:
        """Answers requests for responses over a WebSocket. Raises InvalidInput (BAD_NONCE)."""
        if RECEIPT in socket.headers:
            raise InvalidInput(
                "the handshake has a nonce, which would be that of all requests",
                hint=f"send one of its own as {RECEIPT} in each response.create",
                reason="BAD_NONCE",
                param=RECEIPT,
            )
        await Conversation(socket, self._conversations, self._sockets, self._turns).run()

    async def page(self, request: Request) -> Response:
        return Whole(PAGE, media_type="text/html; charset=utf-8")

    async def docs(self, request: Request) -> Response:
        return Whole(described.page(PATHS.operations()), media_type="text/html; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return Whole(_openapi(), media_type="application/json")

    async def models(self, request: Request) -> Response:
        return _json(model_list(await self._backend.list_models()))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if not name:  # /v1/models/
            return await self.models(request)
        return _json(model_object(await self._backend.get_model(name)))

    async def tags(self, request: Request) -> Response:
        return _json(tags(await self._backend.list_models()))

    async def running(self, request: Request) -> Response:
        return _json(loaded(await self._backend.list_models()))

    async def show(self, request: Request) -> Response:
        body = await self._read(request, lambda body, _: body)
        name = body.get("model") or body.get("name") or ""
        if not isinstance(name, str):
            raise bad("model", "it is not a text")
        return _json(show(await self._backend.get_model(name.removesuffix(":latest"))))

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def software(self, request: Request) -> Response:
        return _json({"version": software_version()})

    async def health(self, request: Request) -> Response:
        """200 while some ring serves, or a model can be loaded: a load balancer sends requests then."""
        models = await self._backend.list_models()
        serving = {model.name: model.rings for model in models}
        ready = any(one.rings or one.availability for one in models)
        answer: dict[str, Any] = {"status": "serving" if ready else "unavailable"}
        if request.state.caller.known:
            answer["rings"] = serving
        return _json(answer, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        """200 while this process answers at all."""
        return _json({"status": "live"})

    async def metrics(self, request: Request) -> Response:
        return Whole(self._exposition(), media_type="text/plain; version=1.0.0; charset=utf-8")


Ask = Callable[[dict[str, Any], str], Asked]


def _asks(ask: Ask) -> Callable[[Edge, Request], Awaitable[Response]]:
    """The handler of one API's questions."""
    return lambda edge, request: edge.ask(request, ask)


PATHS: Paths[Edge] = Paths(
    (
        Path("GET", "/", Edge.page, None),
        Path("GET", "/docs", Edge.docs, ANY),
        Path("GET", "/openapi.json", Edge.openapi, ANY),
        Path("POST", "/v1/chat/completions", _asks(ask_chat), USE, described.CHAT),
        Path("POST", "/v1/completions", _asks(ask_completion), USE, described.COMPLETIONS),
        Path("POST", "/v1/responses", Edge.respond, USE, described.RESPONSES, socket=Edge.converse),
        Path("POST", "/v1/responses/compact", Edge.compact, USE, described.COMPACT),
        Path("POST", "/v1/messages", _asks(ask_messages), USE, described.MESSAGES),
        Path("POST", "/v1/messages/count_tokens", Edge.count, USE, described.COUNT_TOKENS),
        Path("POST", "/v1/embeddings", _asks(ask_embeddings), USE, described.EMBEDDINGS),
        Path("POST", "/v1/rerank", _asks(ask_rerank), USE, described.RERANK),
        Path("POST", "/v2/rerank", _asks(ask_rerank), USE, described.RERANK),  # Cohere's client
        Path("POST", "/api/embed", _asks(ask_embed), USE, described.OLLAMA_EMBED),
        Path("POST", "/api/embeddings", _asks(ask_embedding), USE, described.OLLAMA_EMBEDDINGS),
        Path("POST", "/api/chat", _asks(ask_ollama_chat), USE, described.OLLAMA_CHAT),
        Path("POST", "/api/generate", _asks(ask_ollama_generate), USE, described.OLLAMA_GENERATE),
        Path("POST", "/api/show", Edge.show, LOOK, described.OLLAMA_SHOW),
        Path("GET", "/api/tags", Edge.tags, LOOK, described.OLLAMA_TAGS),
        Path("GET", "/api/ps", Edge.running, LOOK, described.OLLAMA_TAGS),
        Path("GET", "/api/version", Edge.version, LOOK, described.OLLAMA_VERSION),
        Path("GET", "/v1/models", Edge.models, LOOK, described.MODELS),
        Path("GET", "/v1/models/{model}", Edge.model, LOOK, described.MODEL),
        Path("GET", "/ping", Edge.health, ANY, described.HEALTH),  # SageMaker's and vLLM's
        Path("GET", "/version", Edge.software, ANY, described.VERSION),  # vLLM's
        Path("GET", "/health", Edge.health, None, described.HEALTH),
        Path("GET", "/health/live", Edge.live, None, described.LIVE, apart=True),
        Path("GET", "/metrics", Edge.metrics, WATCH, described.METRICS),
    )
)


@functools.cache
def _openapi() -> str:
    return json.dumps(described.openapi(software_version(), PATHS.operations()))


def _summaries(request: Request) -> Summaries:
    """The summaries that the API key of a request opens, whether a key is needed or not."""
    return Summaries((credential(request) or "").partition(" ")[2].strip())


def _headers(begin: inference.Started) -> dict[str, str]:
    if not begin.ring:  # the model was loaded, and nobody has answered
        return {}
    return {
        "x-sealring-ring": begin.ring,
        "x-sealring-min-trust": str(begin.min_trust),
        "x-sealring-roster-version": str(begin.roster_version),
    }


def _json(value: Any, status: int = 200) -> Response:
    return Whole(json.dumps(value), status, media_type="application/json")
