"""The gate before every gRPC method: asked on a call's headers, before its message is received."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio

from sealring.edge.access.gate import ANY, LOOK, USE, WATCH, Caller, Gate, presented
from sealring.edge.access.keys import Scope
from sealring.mesh.errors import DeadlineExceeded, InvalidInput
from sealring.mesh.rpc.interceptor import arity, let_in_caller
from sealring.mesh.rpc.limits import grpc_peer_name

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Admit: TypeAlias = Callable[[Context, "Collection[Scope] | None"], AbstractAsyncContextManager[Caller]]
"""Lets a call with this context in for the length of the block, or not. None: open to everybody."""

MESSAGE_SECONDS = 300.0
"""The time for the message of a call that was let in by its headers, about that of HTTP's longest body."""

KEY_ID: ContextVar[str] = ContextVar("key_id", default="")
"""The id of the API key of the call that is being served, or nothing."""

CLAIM: ContextVar[Callable[[int], None]] = ContextVar("claim", default=Caller().claim)
"""`Caller.claim` of the call that is being served."""

_SCOPES: dict[str, Collection[Scope] | None] = {
    "/sealring.v1.Inference/Generate": USE,
    "/sealring.v1.Inference/LoadModel": USE,
    "/sealring.v1.Inference/ListModels": LOOK,
    "/sealring.v1.Inference/GetRoster": LOOK,
    "/sealring.v1.Inference/GetMetrics": WATCH,
    "/sealring.v1.Inference/GetUsage": WATCH,
    "/grpc.health.v1.Health/Check": None,
}
"""What a method needs. One that is not listed needs a key of any scope."""


class GateInterceptor(grpc.aio.ServerInterceptor):
    """Makes handlers that take one request into such that take a stream of one: gRPC receives the request of
    the former before it calls them. On the wire there is no difference."""

    def __init__(self, admit: Admit) -> None:
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler behind the gate, or None when nobody serves the method."""
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None
        scopes = _SCOPES.get(handler_call_details.method, ANY)
        requests, responses = arity(found)
        call = getattr(found, f"{requests}_{responses}")
        guard = self.stream if found.response_streaming else self.call
        make: Callable[..., Handler] = getattr(grpc, f"stream_{responses}_rpc_method_handler")
        return make(
            guard(call, scopes, one=not found.request_streaming),
            request_deserializer=found.request_deserializer,
            response_serializer=found.response_serializer,
        )

    def call(
        self, call: Callable[..., Awaitable[Any]], scopes: Collection[Scope] | None, *, one: bool
    ) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            async with _admitted(self._admit, context, scopes):
                return await call(await _first(requests) if one else requests, context)

        return guarded

    def stream(
        self, call: Callable[..., Any], scopes: Collection[Scope] | None, *, one: bool
    ) -> Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with _admitted(self._admit, context, scopes):
                responses: Any = call(await _first(requests) if one else requests, context)
                if inspect.isawaitable(responses):  # it writes its responses to the context itself
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        yield response

        return guarded


async def _first(requests: AsyncIterator[Any]) -> Any:
    """Raises InvalidInput (BAD_MESSAGE), DeadlineExceeded (BODY_TOO_SLOW)."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            async for request in requests:
                return request
    except TimeoutError:
        raise DeadlineExceeded(
            f"the message did not arrive within {MESSAGE_SECONDS:g} s", reason="BODY_TOO_SLOW"
        ) from None
    raise InvalidInput("the call has no message", reason="BAD_MESSAGE")


@asynccontextmanager
async def _admitted(admit: Admit, context: Context, scopes: Collection[Scope] | None) -> AsyncIterator[None]:
    async with admit(context, scopes) as caller:
        KEY_ID.set(caller.key_id)
        CLAIM.set(caller.claim)
        with let_in_caller(caller.key_id) if caller.key_id else nullcontext():
            yield


def by_key(gate: Gate) -> Admit:
    """Lets calls in by their API keys."""
    return lambda context, scopes: gate.admit(grpc_peer_name(context.peer()), _authorization(context), scopes)


def _authorization(context: Context) -> str | None:
    found = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    return presented(value for value in found if isinstance(value, str))
