"""The OpenAI-compatible edge over any InferenceBackend."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sealring.api.answers import Renderer, model_object
from sealring.api.chat import ChatRenderer, chat_request, parse_chat
from sealring.api.completions import CompletionRenderer, completion_request, parse_completion
from sealring.api.sampling import CommonBody
from sealring.gateway.access.gate import Gate
from sealring.gateway.http.answers import EventStream, collect, started, unless_disconnected
from sealring.gateway.http.body import read_json
from sealring.gateway.http.guard import Guard
from sealring.gateway.inference.service import InferenceBackend, model_not_found
from sealring.gateway.inference.timings import CURRENT, HEADER
from sealring.v1 import inference_pb2 as inference


def create_app(
    backend: InferenceBackend, *, exposition: Callable[[], bytes], gate: Gate | None = None
) -> Starlette:
    """The ASGI application. `exposition` makes the body of /metrics; without a gate nobody needs a key."""
    edge = _Edge(backend, exposition)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", edge.chat, methods=["POST"]),
            Route("/v1/completions", edge.completion, methods=["POST"]),
            Route("/v1/models", edge.models, methods=["GET"]),
            Route("/v1/models/{name:path}", edge.model, methods=["GET"]),
            Route("/health", edge.health, methods=["GET"]),
            Route("/health/live", edge.live, methods=["GET"]),
            Route("/metrics", edge.metrics, methods=["GET"]),
        ],
        middleware=[Middleware(Guard, gate=gate or Gate())],
        exception_handlers={HTTPException: _pass_on},
    )


def _pass_on(request: Request, error: Exception) -> Response:
    """Leaves Starlette's own errors to the guard."""
    raise error


class _Edge:
    def __init__(self, backend: InferenceBackend, exposition: Callable[[], bytes]) -> None:
        self._backend = backend
        self._exposition = exposition

    async def chat(self, request: Request) -> Response:
        body = parse_chat(await read_json(request))
        return await self._answer(request, body, chat_request(body, request.state.request_id), ChatRenderer)

    async def completion(self, request: Request) -> Response:
        body = parse_completion(await read_json(request))
        work = completion_request(body, request.state.request_id)
        return await self._answer(request, body, work, CompletionRenderer)

    async def _answer(
        self,
        request: Request,
        body: CommonBody,
        work: inference.GenerateRequest,
        form: Callable[..., Renderer],
    ) -> Response:
        key_id = request.state.caller.key_id or ""
        events = self._backend.generate(work, key=key_id or body.user or "", tenant=key_id)
        told = {"include_usage": body.include_usage, "likeliest": body.likeliest}
        if not body.stream:
            collected = collect(events, work.choices)
            begin, answers, finished = await unless_disconnected(request.receive, collected)
            answer = form(begin, work.choices, **told).whole(answers, finished)
            return Response(answer, headers=_headers(begin), media_type="application/json")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(events.aclose)
            begin = await unless_disconnected(request.receive, started(events))
            stack.pop_all()
        return EventStream(events, form(begin, work.choices, **told), _headers(begin))

    async def models(self, request: Request) -> Response:
        models = [model_object(model) for model in await self._backend.list_models()]
        return _json({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        models = await self._backend.list_models()
        for model in models:
            if model.name == name:
                return _json(model_object(model))
        raise model_not_found(name, [model.name for model in models])

    async def health(self, request: Request) -> Response:
        """200 while some ring serves: whoever balances over gateways sends requests then."""
        models = await self._backend.list_models()
        serving = {model.name: model.rings for model in models}
        ready = any(serving.values())
        answer: dict[str, Any] = {"status": "serving" if ready else "unavailable"}
        if request.state.caller.known:
            answer["rings"] = serving
        return _json(answer, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        """200 while this process answers at all."""
        return _json({"status": "live"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._exposition(), media_type="text/plain; version=1.0.0; charset=utf-8")


def _headers(begin: inference.Started) -> dict[str, str]:
    timings = CURRENT.get()
    told = timings.header() if timings else ""
    return {
        **({HEADER: told} if told else {}),
        "x-sealring-ring": begin.ring,
        "x-sealring-min-trust": str(begin.min_trust),
        "x-sealring-roster-version": str(begin.roster_version),
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")
