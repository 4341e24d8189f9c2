"""gRPC servers and clients as all of sealring's processes use them.

One place maps the exception tree to gRPC status (google.rpc.Status with ErrorInfo and Help text in the
message) and back; unknown exceptions are masked, because grpc.aio would send their text to the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from mesh.addresses import listen_error, require_loopback
from mesh.errors import DOMAIN, Cancelled, DeadlineExceeded, Internal, SealringError, Unavailable
from mesh.problem import from_parts

MAX_MESSAGE = 16 << 20

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
]

log = structlog.get_logger()


def to_status(error: SealringError) -> status_pb2.Status:
    """A rich status: the message with its hint, and ErrorInfo with the stable reason."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    if error.hint:
        info.metadata["hint"] = error.hint
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code) if error.code in code_pb2.Code.DESCRIPTOR.values_by_name else code_pb2.UNKNOWN,
        message=str(error),
        details=[detail],
    )


def from_rpc_error(error: grpc.RpcError) -> SealringError:
    """The error of the tree that a failed call stands for, with the server's own reason and hint."""
    code, details = error.code().name, error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            metadata = dict(info.metadata)
            hint = metadata.pop("hint", "")
            message = details.removesuffix(f" (hint: {hint})") if hint else details
            return from_parts(code, info.reason, message, hint, metadata)
    if code == "UNAVAILABLE":
        return Unavailable("the server cannot be reached", hint="check its address and that it runs")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("the call took longer than its deadline", hint="try again or allow more time")
    if code == "CANCELLED":
        return Cancelled("the call was cancelled")
    return from_parts(code, code, details, "")


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Outermost: turns the exception tree into rich status and masks everything else."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.unary_unary:
            return _rewrap(handler, unary_unary=_guard_call(handler.unary_unary, method))
        if handler.stream_unary:
            return _rewrap(handler, stream_unary=_guard_call(handler.stream_unary, method))
        if handler.unary_stream:
            return _rewrap(handler, unary_stream=_guard_stream(handler.unary_stream, method))
        return _rewrap(handler, stream_stream=_guard_stream(handler.stream_stream, method))


def _rewrap(handler: Any, **behaviour: Any) -> grpc.RpcMethodHandler:
    make = getattr(grpc, f"{next(iter(behaviour))}_rpc_method_handler")
    return make(
        next(iter(behaviour.values())),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _guard_call(call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(request, context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(call: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in call(request, context):
                yield response
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, SealringError):
        log.error("unexpected error in a handler", method=method, kind=type(error).__name__, exc_info=True)
        error = Internal("an internal error", hint="see the server's log")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


class Server:
    """A grpc.aio server with health, reflection and masked errors.

    `services` are (add_to_server function, servicer, full service name). `start` returns the bound port
    and raises ConfigError when the address is in use.
    """

    def __init__(
        self,
        services: Sequence[tuple[Callable[[Any, Any], None], Any, str]],
        *,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=[*SERVER_OPTIONS, *options],
        )
        self._health = health.aio.HealthServicer()
        names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        for add, servicer, name in services:
            add(servicer, self._server)
            names.append(name)
        self._names = names[2:]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(names, self._server)

    def listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Binds; None credentials are for loopback only. Returns the port."""
        try:
            if credentials is None:
                require_loopback(address)
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise listen_error(address) from None

    async def start(self) -> None:
        await self._server.start()
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """NOT_SERVING first; streams must have been told goodbye by their own handlers."""
        await self.set_serving(False)
        await self._server.stop(grace)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


async def with_deadline(awaitable: Awaitable[Any], seconds: float, what: str) -> Any:
    """Raises DeadlineExceeded naming `what` when it takes longer."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s", hint="try again") from None
