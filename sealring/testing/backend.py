"""A backend for the HTTP edge that answers what a test tells it to, and a server of the edge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.inference.service import InferenceBackend, model_not_found
from sealring.mesh.errors import SealringError
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
    """An `InferenceBackend` that answers every prompt with `texts`, a token each.

    It takes requests for the models of `models` as a gateway does, and raises InvalidInput and NotFound
    (MODEL_NOT_FOUND) for others.
    """

    texts: list[str] = field(default_factory=lambda: ["Hel", "lo", " – ☃"])
    error: SealringError | None = None
    """What an answer fails with: at once, or after `error_after` texts."""
    error_after: int | None = None
    pause: float = 0.0
    """Seconds before each text."""
    held: asyncio.Event | None = None
    """Answers and loads wait until it is set."""
    prompt_tokens: int = 5
    sealed: bool = False
    """Only an answer's end tells its prompt's tokens."""
    cached: int = 0
    """Tokens of the prompt that were not computed again."""
    load_ms: int = 0
    drafted: int = 0
    """Drafted tokens, of which one was right."""
    parsed: list[inference.Parsed | None] = field(default_factory=list)
    """Reasoning and calls beside each text; empty: none."""
    logprobs: list[list[inference.TokenLogprob]] = field(default_factory=list)
    """Logprobs beside each text; empty: none."""
    reason: inference.FinishReason.ValueType = inference.FINISH_REASON_STOP
    models: list[inference.Model] = field(default_factory=lambda: [MODEL])
    requests: list[inference.GenerateRequest] = field(default_factory=list)
    """Those that were taken; `keys` are the clients that sent them."""
    keys: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """Ids of requests whose answers are over, whole or not."""
    loads: list[tuple[str, int | None, str]] = field(default_factory=list)
    """Models, with `keep_alive` in seconds and the tenant."""
    roster: bytes = b""

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        validate_request(request)
        model = await self.get_model(request.model)
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
                    model=model.name,
                    ring=f"{model.name}-0",
                    prompt_tokens=0 if self.sealed else self.prompt_tokens,
                    min_trust=model.min_trust,
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
                    prompt_tokens=self.prompt_tokens,
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
        return inference.GetRosterResponse(roster=self.roster)


@contextlib.asynccontextmanager
async def serve_edge(
    backend: InferenceBackend, *, tls: EdgeTls | None = None, **options: Any
) -> AsyncIterator[int]:
    """The edge's HTTP server over `backend` on a port of loopback, which it gives.

    `options` are those of `sealring.edge.http.app.create_app`. Raises ConfigError (CANNOT_LISTEN).
    """
    server = HttpServer(create_app(backend, **{"exposition": lambda: b"# none\n", **options}), tls=tls)
    port = server.listen("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop()
