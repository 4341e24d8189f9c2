"""The inference interface: one Protocol, the backend over this gateway's rings, and the gRPC service.

The HTTP edge knows the Protocol only, so a client with sealed envelopes can stand behind the same edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import grpc.aio

from sealring.gateway.access.interceptor import CLAIM, KEY_ID
from sealring.gateway.inference.answer import Answer
from sealring.gateway.inference.kept import KeptAnswers
from sealring.gateway.inference.sending import SendWatch
from sealring.gateway.inference.timings import CURRENT, HEADER, Timings
from sealring.gateway.metrics import Metrics
from sealring.gateway.scheduler.actions import Request
from sealring.gateway.scheduler.scheduler import MAX_ATTEMPTS
from sealring.mesh.errors import InvalidInput, NotFound, SealringError, Unavailable
from sealring.mesh.names import served_name
from sealring.mesh.prompt.routing import SECRET_BYTES, routing_key
from sealring.mesh.prompt.sealed import RequestInfo
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

SERVICE = "sealring.v1.Inference"
MAX_KEY = 256
MAX_RING = 64
_RETRY_SECONDS = 5


class InferenceBackend(Protocol):
    """Whatever answers prompts. Errors are of the tree in mesh.errors."""

    def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """Started, deltas, Finished. Closing the generator cancels the request everywhere.

        `key` is who asks; requests of different keys take turns. `tenant` is the id of an API key, or empty
        where there are none: prompts of one tenant may share kept prefixes. Raises InvalidInput, NotFound
        (MODEL_NOT_FOUND), ResourceExhausted (QUEUE_FULL), FailedPrecondition (TRUST_BELOW_FLOOR),
        Unavailable (RING_DOWN, and RING_GONE when a prompt was sealed for a ring that is not there).
        """
        ...

    async def list_models(self) -> list[inference.Model]:
        """The models that can be asked for, by name."""
        ...

    async def get_model(self, name: str) -> inference.Model:
        """One of these. Raises NotFound (MODEL_NOT_FOUND), Unavailable (RING_DOWN) before all are known."""
        ...

    async def get_roster(self) -> inference.GetRosterResponse:
        """The signed roster as the coordinator gave it, and which of its rings serve just now."""
        ...


class Router(Protocol):
    """What the backend needs of the rings."""

    @property
    def complete(self) -> bool:
        """Whether it is known which deployments there are."""

    def deployments(self) -> list[str]: ...

    def models(self) -> list[inference.Model]: ...

    def signed_roster(self) -> inference.GetRosterResponse: ...

    def submit(self, model: str, request: Request, answer: Answer, *, min_trust: int) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class RingBackend:
    """Answers prompts with the rings that this gateway schedules."""

    def __init__(self, rings: Router, metrics: Metrics) -> None:
        self._rings = rings
        self._metrics = metrics
        self._routing_secret = os.urandom(SECRET_BYTES)
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._draining = False

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        if self._draining:
            raise Unavailable(
                "the gateway is stopping",
                hint="ask another one, or try again later",
                reason="STOPPING",
                retry_after=_RETRY_SECONDS,
            )
        timings = CURRENT.get() or Timings()
        validate_request(request)
        model = self._model(request.model)
        _check_sealed_for(request.envelope, model)
        request_id = request.request_id or f"req-{secrets.token_hex(12)}"
        if request_id in self._running:
            raise InvalidInput(
                "the request id is in use",
                hint="use every request id once",
                reason="REQUEST_ID_IN_USE",
                param="request_id",
            )
        answer = Answer(timings)
        timings.parsed = time.perf_counter()
        work = Request(
            request_id,
            key[:MAX_KEY],
            request.max_tokens,
            request.envelope,
            model,
            tenant,
            request.choices or 1,
            request.envelope.clear.sampling.HasField("logprobs"),
            routing_key=self._routing_key(request, tenant),
            priority=request.priority,
            patience=request.deadline_ms / 1e3 or math.inf,
            claimed=min(request.attempts, MAX_ATTEMPTS - 1),
        )
        self._running.add(request_id)
        try:
            with self._metrics.request(model) as observed:
                self._rings.submit(model, work, answer, min_trust=request.min_trust)
                async for event in answer:
                    if not timings.first and event.WhichOneof("event") != "started":
                        timings.first = time.perf_counter()
                        observed.segments(timings.segments())
                    observed.event(event)
                    yield event
        except SealringError as error:
            raise _counted(error, work) from error.__cause__
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._idle.set()
            self._rings.cancel(request_id)

    async def list_models(self) -> list[inference.Model]:
        models = self._rings.models()
        if self._draining:
            for model in models:
                model.rings = 0
        return models

    async def get_model(self, name: str) -> inference.Model:
        known = self._model(name)
        return next(model for model in await self.list_models() if model.name == known)

    async def get_roster(self) -> inference.GetRosterResponse:
        return self._rings.signed_roster()

    async def drain(self, seconds: float) -> None:
        """Takes no more requests and gives those under way so long to end."""
        self._draining = True
        if self._running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    def _routing_key(self, request: inference.GenerateRequest, tenant: str) -> bytes:
        """Sealed prompts have none here: they name their ring."""
        if request.envelope.WhichOneof("content") != "clear":
            return b""
        key = request.prompt_cache_key if request.HasField("prompt_cache_key") else None
        return routing_key(self._routing_secret, tenant, key, request.envelope.clear)

    def _model(self, name: str) -> str:
        names = self._rings.deployments()
        if (known := served_name(name, names)) is not None:
            return known
        if not self._rings.complete:
            raise Unavailable(
                "the gateway does not know yet which models there are",
                hint="try again later",
                reason="RING_DOWN",
                retry_after=_RETRY_SECONDS,
            )
        raise model_not_found(name, names)


def _counted(error: SealringError, request: Request) -> SealringError:
    """With the epochs that the request has ended, from which a client goes on counting that asks again."""
    counted = copy.copy(error)  # others may have been told the same one
    counted.metadata = {**error.metadata, **({"attempts": str(request.tried)} if request.tried else {})}
    return counted


def _check_sealed_for(envelope: inference.Envelope, model: str) -> None:
    """Raises InvalidInput (BAD_REQUEST_INFO) unless a sealed prompt says for whom and no other does."""
    to, sealed = envelope.sealed_for, envelope.WhichOneof("content") == "sealed"
    if sealed:
        RequestInfo(model, to.request_id, to.expires, to.roster_hash)
    if len(to.ring) > MAX_RING or bool(to.ring) != sealed:
        raise InvalidInput(
            "a sealed prompt must name its ring, and no other may",
            reason="BAD_REQUEST_INFO",
            param="envelope.sealed_for.ring",
        )


def model_not_found(name: str, names: list[str]) -> NotFound:
    shown = ", ".join(names[:20]) or "none"
    return NotFound(
        f"there is no model {name[:128]!r}" if name else "the request names no model",
        hint=f"the models here are: {shown}",
        reason="MODEL_NOT_FOUND",
        param="model",
    )


class InferenceService(inference_grpc.InferenceServicer):
    """`sealring.v1.Inference` over a backend."""

    def __init__(
        self,
        backend: InferenceBackend,
        exposition: Callable[[], bytes],
        kept: KeptAnswers | None = None,
    ) -> None:
        self._backend = backend
        self._exposition = exposition
        self._kept = kept or KeptAnswers()

    async def Generate(  # noqa: N802
        self, request: inference.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference.GenerateResponse]:
        timings = Timings()
        CURRENT.set(timings)
        CLAIM.get()(request.choices)
        async with contextlib.aclosing(self._events(request, context)) as events:
            with SendWatch() as watch:
                async for event in events:
                    watch.begin()
                    yield event
                    watch.end()
        context.set_trailing_metadata(((HEADER, timings.header()),))

    def _events(
        self, request: inference.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """A new answer, or the one that has the call's `idempotency-key`."""
        key_id, caller = KEY_ID.get(), _caller(context)

        def start() -> AsyncGenerator[inference.GenerateResponse, None]:
            return self._backend.generate(request, key=caller, tenant=key_id)

        key = _metadata(context).get("idempotency-key")
        if key is None:
            return start()
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        return self._kept.events(key_id, key, digest, start)

    async def ListModels(  # noqa: N802
        self, request: inference.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.ListModelsResponse:
        return inference.ListModelsResponse(models=await self._backend.list_models())

    async def GetRoster(  # noqa: N802
        self, request: inference.GetRosterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.GetRosterResponse:
        return await self._backend.get_roster()

    async def GetMetrics(  # noqa: N802
        self, request: inference.GetMetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.GetMetricsResponse:
        return inference.GetMetricsResponse(exposition=self._exposition())


def _caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Who asks: the id of its API key; without keys the client's own word, or its connection."""
    key_id = KEY_ID.get()
    if key_id:
        return key_id
    return _metadata(context).get("sealring-user") or context.peer()


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """What is text of what came beside the call."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
