"""The real app on the real server, over a backend that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.inference.service import model_not_found
from sealring.mesh.errors import NotFound, SealringError
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference

MODEL = inference.Model(
    name="demo",
    model_type="llama",
    context=256,
    min_trust=10,
    rings=1,
    created=1_700_000_000,
    rows=8,
    capabilities=["tools"],
)


@dataclass
class ScriptedBackend:
    """Answers every prompt with `texts`; fails with `error` after `error_after` of them."""

    texts: list[str] = field(default_factory=lambda: ["Hel", "lo", " – ☃"])
    error: SealringError | None = None
    error_after: int | None = None
    pause: float = 0.0
    begins_with: int = 5
    cached: int = 0
    load_ms: int = 0
    drafted: int = 0
    """Drafted tokens, of which one was right."""
    held: asyncio.Event | None = None
    parsed: list[inference.Parsed | None] = field(default_factory=list)
    logprobs: list[list[inference.TokenLogprob]] = field(default_factory=list)
    reason: inference.FinishReason.ValueType = inference.FINISH_REASON_STOP
    requests: list[inference.GenerateRequest] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    models: list[inference.Model] = field(default_factory=lambda: [MODEL])
    loads: list[tuple[str, int | None, str]] = field(default_factory=list)
    """Models, with `keep_alive` and the tenant."""

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        validate_request(request)
        if request.model != "demo":
            raise NotFound(
                "there is no model", hint="the models here are: demo", reason="MODEL_NOT_FOUND", param="model"
            )
        self.requests.append(request)
        self.keys.append(key)
        try:
            if self.error is not None and self.error_after is None:
                raise self.error
            if self.held is not None:
                await self.held.wait()
            yield inference.GenerateResponse(
                started=inference.Started(
                    request_id=request.request_id,
                    model="demo",
                    ring="ring-0",
                    prompt_tokens=self.begins_with,
                    min_trust=10,
                    roster_version=3,
                    load_ms=self.load_ms,
                )
            )
            for number, text in enumerate(self.texts, 1):
                await asyncio.sleep(self.pause)
                if self.error is not None and number > (self.error_after or 0):
                    raise self.error
                told = self.logprobs[number - 1] if self.logprobs else []
                beside = self.parsed[number - 1] if self.parsed else None
                yield inference.GenerateResponse(
                    delta=inference.Delta(text=text, tokens=number, logprobs=told, parsed=beside)
                )
            yield inference.GenerateResponse(
                finished=inference.Finished(
                    reason=self.reason,
                    prompt_tokens=5,
                    completion_tokens=len(self.texts),
                    cached_tokens=self.cached,
                    drafted_tokens=self.drafted,
                    accepted_tokens=self.drafted and 1,
                )
            )
        finally:
            self.closed.append(request.request_id)

    async def list_models(self) -> list[inference.Model]:
        return self.models

    async def get_model(self, name: str) -> inference.Model:
        if (found := next((one for one in self.models if one.name == name), None)) is None:
            raise model_not_found(name, [one.name for one in self.models])
        return found

    async def load_model(self, name: str, keep_alive: int | None, *, tenant: str = "") -> inference.Model:
        self.loads.append((name, keep_alive, tenant))
        if self.held is not None:
            await self.held.wait()
        return await self.get_model(name)

    async def get_roster(self) -> inference.GetRosterResponse:
        return inference.GetRosterResponse()


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def calling(backend: ScriptedBackend) -> ScriptedBackend:
    """Thinks, says something, and calls two tools at once."""
    calls = [inference.ToolCall(name="look", arguments='{"at": 1}'), inference.ToolCall(name="look")]
    backend.texts = ["", "Let me see.", ""]
    backend.parsed = [inference.Parsed(reasoning="hm"), None, inference.Parsed(tool_calls=calls)]
    return backend


@contextlib.asynccontextmanager
async def served(backend: Any, *, tls: EdgeTls | None = None, **options: Any) -> AsyncIterator[int]:
    """The port of a server; `options` are those of `create_app`."""
    server = HttpServer(create_app(backend, exposition=lambda: b"# none\n", **options), tls=tls)
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop()


@pytest.fixture
async def port(backend: ScriptedBackend) -> AsyncIterator[int]:
    async with served(backend) as port:
        yield port
