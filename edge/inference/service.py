"""The interface of whatever answers prompts, and the gRPC service over it.

The HTTP edge knows this interface only, so a client that seals prompts can stand behind the same edge.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc.aio

from sealring.edge.access.interceptor import CLAIM, KEY_ID
from sealring.edge.inference.kept import KeptAnswers
from sealring.edge.inference.timers import SendWatch
from sealring.mesh.errors import NotFound
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

SERVICE = "sealring.v1.Inference"


class InferenceBackend(Protocol):
    """The interface to what answers prompts: rings, or the proxy's client. Errors are of mesh.errors."""

    def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """Started, deltas, Finished. Closing the generator cancels the request everywhere.

        `key` names the client; requests of different keys take turns. `tenant` is the id of an API key, or
        empty without keys: prompts of one tenant may share kept prefixes. Raises InvalidInput, NotFound
        (MODEL_NOT_FOUND), ResourceExhausted (QUEUE_FULL, TOO_MANY_BYTES), FailedPrecondition
        (TRUST_BELOW_FLOOR), Unavailable (RING_DOWN, and RING_GONE when a prompt was sealed for a ring that is
        not there).
        """
        ...

    async def list_models(self) -> list[inference.Model]:
        """The models that can be asked for, by name."""
        ...

    async def get_model(self, name: str) -> inference.Model:
        """One of these. Raises NotFound (MODEL_NOT_FOUND), Unavailable (RING_DOWN) before all are known."""
        ...

    async def load_model(self, name: str, keep_alive: int | None, *, tenant: str = "") -> inference.Model:
        """Loads a model on demand and waits until it serves, or with `keep_alive` 0 unloads it unless another
        `tenant` wants it. Any other model stays as it is. `keep_alive` is GenerateRequest's, or None.

        Raises NotFound (MODEL_NOT_FOUND), Unavailable, and the reason why it cannot be loaded.
        """
        ...

    async def get_roster(self) -> inference.GetRosterResponse:
        """The signed roster as the coordinator gave it, and which of its rings serve just now."""
        ...


class InferenceService(inference_grpc.InferenceServicer):
    """`sealring.v1.Inference` over a backend."""

    def __init__(
        self,
        backend: InferenceBackend,
        exposition: Callable[[], bytes],
        usage: Callable[[inference.GetUsageRequest], Awaitable[inference.GetUsageResponse]],
        kept: KeptAnswers | None = None,
    ) -> None:
        """`usage` tells what was used."""
        self._backend = backend
        self._exposition = exposition
        self._usage = usage
        self._kept = kept or KeptAnswers()

    async def Generate(  # noqa: N802
        self, request: inference.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference.GenerateResponse]:
        CLAIM.get()(request.choices)
        async with contextlib.aclosing(self._events(request, context)) as events:
            with SendWatch() as watch:
                async for event in events:
                    watch.begin()
                    yield event
                    watch.end()

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

    async def LoadModel(  # noqa: N802
        self, request: inference.LoadModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.LoadModelResponse:
        keep_alive = request.keep_alive if request.HasField("keep_alive") else None
        model = await self._backend.load_model(request.model, keep_alive, tenant=KEY_ID.get())
        return inference.LoadModelResponse(model=model)

    async def GetRoster(  # noqa: N802
        self, request: inference.GetRosterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.GetRosterResponse:
        return await self._backend.get_roster()

    async def GetMetrics(  # noqa: N802
        self, request: inference.GetMetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.GetMetricsResponse:
        return inference.GetMetricsResponse(exposition=self._exposition())

    async def GetUsage(  # noqa: N802
        self, request: inference.GetUsageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference.GetUsageResponse:
        return await self._usage(request)


def _caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The client's name: the id of its API key; without keys its own word, or its connection."""
    key_id = KEY_ID.get()
    if key_id:
        return key_id
    return _metadata(context).get("sealring-user") or context.peer()


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """The call's metadata with text values."""
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def model_not_found(name: str, names: list[str]) -> NotFound:
    if names:
        what = f"there is no model {name[:128]!r}" if name else "the request names no model"
        hint = f"the models here are: {', '.join(names[:20])}"
    else:
        what, hint = "no model is served", "an operator has one served with: sealring deploy MODEL"
    return NotFound(
        what,
        hint=hint,
        reason="MODEL_NOT_FOUND",
        param="model",
    )
