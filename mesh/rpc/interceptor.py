"""The outermost server interceptor: decodes requests, and turns errors into rich status or masks them.

grpc.aio would send the text of an unknown exception to the peer, and that of a decoder too. gRPC checks a
certificate only when a connection is made. This interceptor refuses calls once the caller's certificate has
expired. It also ends the caller's open streams, unless the caller has proved a newer certificate on them
(`mesh/member/tenure.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from cryptography import x509
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from sealring.mesh.clock import SKEW_SECONDS, wall_clock
from sealring.mesh.errors import Internal, InvalidInput, SealringError, Unauthenticated, forget_frames
from sealring.mesh.rpc.status import to_status
from sealring.mesh.rpc.wire import check_fields

log = structlog.get_logger()

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Decoder: TypeAlias = Callable[[bytes], Any]
LetIn: TypeAlias = Callable[[str, str], AbstractContextManager[None]]

FIRST_SECONDS = 5.0
"""How long a refused stream waits for its caller's first request."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. Handlers read requests from their iterator, not with `context.read`.

    With `counting`, a request of more fields than `mesh/rpc/wire.py` takes is refused before it is decoded.
    `vouch` is called with the peer of each call whose caller has a certificate, and `let_in` with the peer
    and the caller's name of each call in which `let_in_caller` is called.
    """

    def __init__(
        self,
        *,
        counting: bool = False,
        vouch: Callable[[str, str], None] = lambda peer, name: None,
        let_in: LetIn = lambda peer, name: contextlib.nullcontext(),
    ) -> None:
        self._counting = counting
        self._vouch = vouch
        self._let_in = let_in

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The wrapped handler, or None for an unknown method."""
        found: Any = await continuation(handler_call_details)
        if found is None:
            return None
        method = handler_call_details.method
        kind = "_".join(arity(found))
        decode = _decoder(
            found.request_deserializer, streaming=found.request_streaming, counting=self._counting
        )
        guard = _guard_stream if found.response_streaming else _guard_call
        make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded = guard(self._letting_in(getattr(found, kind)), decode, method, self._vouch)
        encode = _encoder(found.response_serializer)
        return make(guarded, request_deserializer=None, response_serializer=encode)

    def _letting_in(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(request: Any, context: Context) -> Any:
            _LET_IN.set(lambda name: self._let_in(context.peer(), name))
            return call(request, context)

        return called


_LET_IN: ContextVar[Callable[[str], AbstractContextManager[None]]] = ContextVar(
    "let_in", default=lambda name: contextlib.nullcontext()
)


def let_in_caller(name: str) -> AbstractContextManager[None]:
    """For the length of the block: the caller has shown what lets it in, an API key of this name."""
    return _LET_IN.get()(name)


def arity(handler: Any) -> tuple[str, str]:
    """gRPC's words, "unary" or "stream", for a handler's requests and for its responses."""
    requests, responses = handler.request_streaming, handler.response_streaming
    return "stream" if requests else "unary", "stream" if responses else "unary"


def _encoder(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A handler may answer with bytes: a message that it has encoded itself."""
    return lambda response: response if isinstance(response, bytes) else encode(response)


def _decoder(decode: Decoder | None, *, streaming: bool, counting: bool) -> Callable[[Any], Any]:
    if decode is None:
        return lambda raw: raw

    kind = decode.__self__.DESCRIPTOR if counting else None  # type: ignore[attr-defined]  # of `FromString`

    def one(data: bytes) -> Any:
        if kind is not None:
            check_fields(data, kind)
        try:
            return decode(data)
        except DecodeError:
            raise InvalidInput(
                "the request cannot be decoded",
                hint="strings have to be UTF-8; use the protos of this release",
                reason="BAD_MESSAGE",
            ) from None

    async def many(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield one(data)

    return many if streaming else one


def _guard_call(
    call: Callable[..., Awaitable[Any]],
    decode: Callable[[Any], Any],
    method: str,
    vouch: Callable[[str, str], None],
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            _certificate_ends(context, vouch)
            return await call(decode(request), context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


class _Requests:
    """A stream's requests, and whether its handler has begun to read them."""

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self._requests = requests  # without aiter(): gRPC makes a generator then, and warns if it is not run
        self._asked = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._asked = True
        return await anext(self._requests)

    async def hear_first(self) -> None:
        """Waits up to FIRST_SECONDS for the caller's first request, unless the handler has read it.

        A grpc.aio caller whose write meets the end of its stream reads INTERNAL instead of the stream's
        status. Only for callers with a certificate: a stranger's request is not received before it is
        admitted.
        """
        if not self._asked:
            with contextlib.suppress(TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(FIRST_SECONDS):
                    await anext(self)


def _guard_stream(
    call: Callable[..., Any],
    decode: Callable[[Any], Any],
    method: str,
    vouch: Callable[[str, str], None],
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        requests = _Requests(request) if isinstance(request, AsyncIterator) else None
        try:
            ends = _certificate_ends(context, vouch)
            async with asyncio.timeout(None) as limit:
                stream_lease.set(Lease(limit, ends))
                responses = call(decode(requests or request), context)
                if inspect.isawaitable(responses):  # it writes its responses to the context itself
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        # Inside the time limit: a caller that does not read must not keep its stream after
                        # its certificate has expired.
                        yield response
        except Exception as error:
            if requests is not None and _certificates(context):
                await requests.hear_first()
            expired = isinstance(error, TimeoutError) and limit.expired()
            await _abort(_expired() if expired else error, context, method)

    return guarded


class Lease:
    """The end of a stream's life in seconds since 1970: the expiry of its caller's certificate."""

    def __init__(self, limit: asyncio.Timeout, ends: float) -> None:
        self._limit = limit
        self.ends = -math.inf
        self.extend(ends)

    def extend(self, ends: float) -> None:
        """Ends the stream no earlier than `ends`. Has no effect once the stream is ending."""
        if ends <= self.ends or self._limit.expired():
            return
        self.ends = ends
        left = ends + SKEW_SECONDS - wall_clock()
        self._limit.reschedule(None if math.isinf(ends) else asyncio.get_running_loop().time() + left)


stream_lease: ContextVar[Lease] = ContextVar("lease")
"""The lease of the stream that this task, or the task that started it, handles."""


def _certificate_ends(context: Context, vouch: Callable[[str, str], None]) -> float:
    """When the caller's certificate ends, in seconds since 1970; infinity for a caller without one.

    Calls `vouch` with the peer if the certificate is valid. Raises Unauthenticated (CERTIFICATE_EXPIRED).
    """
    found = [x509.load_pem_x509_certificate(pem) for pem in _certificates(context)]
    ends = min((one.not_valid_after_utc.timestamp() for one in found), default=math.inf)
    if ends + SKEW_SECONDS <= wall_clock():
        raise _expired()
    if found:
        vouch(context.peer(), b" ".join(context.auth_context().get("peer_uri", [])).decode(errors="replace"))
    return ends


def _certificates(context: Context) -> list[bytes]:
    """The caller's certificates in PEM; none on a port that asks for none."""
    return list(context.auth_context().get("x509_pem_cert", []))


def _expired() -> Unauthenticated:
    return Unauthenticated(
        "the caller's certificate has expired",
        hint="connect anew with a certificate that is valid",
        reason="CERTIFICATE_EXPIRED",
    )


async def _abort(error: Exception, context: Context, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = error if isinstance(error, SealringError) else None
    if known is None:
        log.error("handler_error", method=method, exc_info=error)
        known = Internal("an internal error", hint="see the server's log")
    forget_frames(error)
    await context.abort_with_status(rpc_status.to_status(to_status(known)))
