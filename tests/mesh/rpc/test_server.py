from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from refusals import refused

from sealring.mesh.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    NotFound,
    SealringError,
    Unavailable,
)
from sealring.mesh.rpc import CHANNEL_OPTIONS, JOINING, Server, from_rpc_error, to_status
from sealring.mesh.rpc import server as rpc
from sealring.mesh.rpc.server import SERVER_OPTIONS, Port
from sealring.mesh.rpc.wire import MAX_FIELDS
from sealring.v1 import inference_pb2, inference_pb2_grpc, membership_pb2, membership_pb2_grpc

MARK = "the eagle lands at noon"
INFERENCE = "sealring.v1.Inference"


class Inference(inference_pb2_grpc.InferenceServicer):
    """Fails in the way that the request's model names."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def _fail(self, how: str) -> None:
        if how == "unknown":
            raise NotFound(f"no model {how}", hint="see sealring status", param="model", known=2)
        if how == "bug":
            raise KeyError(MARK)

    async def ListModels(self, request: Any, context: Any) -> Any:
        self._fail(dict(context.invocation_metadata()).get("how", ""))
        return inference_pb2.ListModelsResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield inference_pb2.GenerateResponse()
            self._fail(request.model)
            if request.model == "endless":
                while True:
                    await asyncio.sleep(0.01)
        finally:
            self.ended.set()

    async def GetRoster(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "by hand")


class Membership(membership_pb2_grpc.MembershipServicer):
    """Any stream would do: it says each goodbye back, and plays no coordinator."""

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in request_iterator:
            yield membership_pb2.CoordinatorMessage(
                goodbye=membership_pb2.Goodbye(reason=message.goodbye.reason)
            )


@contextlib.asynccontextmanager
async def served(servicer: Inference | None = None, **options: Any) -> AsyncIterator[tuple[Server, int]]:
    """A server and its port."""
    services = [
        (inference_pb2_grpc.add_InferenceServicer_to_server, servicer or Inference(), INFERENCE),
        (membership_pb2_grpc.add_MembershipServicer_to_server, Membership(), "sealring.v1.Membership"),
    ]
    server = Server(services, **options)
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield server, port
    await server.stop(0)
    await server.wait()


def connected(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)


@pytest.fixture
async def servicer() -> Inference:
    return Inference()


@pytest.fixture
async def channel(servicer: Inference) -> AsyncIterator[grpc.aio.Channel]:
    async with served(servicer) as (_, port), connected(port) as channel:
        yield channel


@pytest.fixture
async def narrow() -> AsyncIterator[int]:
    """The port of a server that takes very little."""
    async with served(port=Port(connections=2, streams=3, message=100)) as (_, port):
        yield port


def inference(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]


async def failure(call: Any) -> SealringError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            _ = [one async for one in call]
        else:
            await call
    assert MARK not in str(caught.value)
    return from_rpc_error(caught.value)


async def test_a_handlers_own_abort_passes(channel: grpc.aio.Channel) -> None:
    error = await failure(inference(channel).GetRoster(inference_pb2.GetRosterRequest()))
    assert (error.code, error.message, error.reason) == (
        "FAILED_PRECONDITION",
        "by hand",
        "FAILED_PRECONDITION",
    )


async def test_a_request_that_is_no_message_is_the_callers_fault(channel: grpc.aio.Channel) -> None:
    unary = channel.unary_stream(f"/{INFERENCE}/Generate")
    error = await failure(unary(b"\x0a\x02\xff\xfe"))
    assert type(error) is InvalidInput
    assert error.reason == "BAD_MESSAGE"
    stream = channel.stream_stream("/sealring.v1.Membership/Session")
    error = await failure(stream(iter([b"\xff"])))
    assert error.reason == "BAD_MESSAGE"


async def test_streams_pass_both_ways(channel: grpc.aio.Channel) -> None:
    stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call,unused-ignore]

    async def requests() -> AsyncIterator[Any]:
        for reason in "ab":
            yield membership_pb2.MemberMessage(goodbye=membership_pb2.Goodbye(reason=reason))

    assert [one.goodbye.reason async for one in stub.Session(requests())] == ["a", "b"]


async def test_a_cancelled_call_ends_the_handler(channel: grpc.aio.Channel, servicer: Inference) -> None:
    call = inference(channel).Generate(inference_pb2.GenerateRequest(model="endless"))
    await call.read()
    call.cancel()
    async with asyncio.timeout(200):
        await servicer.ended.wait()


async def test_listening_is_refused_where_it_must_be() -> None:
    server = Server([])
    with refused("LOOPBACK_ONLY", ConfigError):
        server.listen("0.0.0.0:0", None)
    with pytest.raises(InvalidInput):
        server.listen("nowhere", None)
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    with pytest.raises(ConfigError) as caught:
        Server([]).listen(f"127.0.0.1:{port}", None)
    assert caught.value.reason == "CANNOT_LISTEN"
    assert "lsof" in caught.value.hint
    await server.stop(0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, Internal),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidInput),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
@pytest.mark.parametrize("trailers", [(), (("grpc-status-details-bin", b"\xff"),)])
def test_a_bare_status_has_an_error_too(
    code: grpc.StatusCode, kind: type[SealringError], trailers: tuple[tuple[str, bytes], ...]
) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details="said so")
    assert type(from_rpc_error(bare)) is kind


def test_a_status_fits_the_trailers() -> None:
    huge = InvalidInput("m" * 9000, hint="h" * 9000, **{f"k{i}": "v" * 500 for i in range(99)})
    assert to_status(huge).ByteSize() < 6000


async def test_a_start_that_is_cancelled_has_not_begun() -> None:
    """As by Ctrl-C, which asyncio keeps for the first moment at which a process waits."""
    server = Server([])
    port = server.listen("127.0.0.1:0", None)
    starting = asyncio.create_task(server.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await server.stop(0)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0" + bytes(4)  # and empty settings (RFC 9113, 3.4)
SETTINGS, PING, GOAWAY = 4, 6, 7


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """The HTTP/2 frames that a server sends, each as its kind and its payload, until it closes."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            async with asyncio.timeout(200):
                head = await reader.readexactly(9)
            yield head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_streams_of_a_connection_are_bounded(narrow: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", narrow)
    writer.write(PREFACE)
    kind, payload = await anext(frames(reader))
    assert kind == SETTINGS
    told = {payload[at : at + 2]: payload[at + 2 : at + 6] for at in range(0, len(payload), 6)}
    assert int.from_bytes(told[b"\0\3"], "big") == 3  # SETTINGS_MAX_CONCURRENT_STREAMS
    writer.close()


async def test_a_flood_of_pings_ends_its_connection(narrow: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", narrow)
    writer.write(PREFACE + (b"\0\0\x08\6\0" + bytes(4) + b"12345678") * 50)
    goodbyes = [payload async for kind, payload in frames(reader) if kind == GOAWAY]
    assert b"too_many_pings" in goodbyes[-1]
    writer.close()


async def test_connections_are_bounded(narrow: int) -> None:
    def open_one() -> Any:
        return asyncio.open_connection("127.0.0.1", narrow)

    taken = [await open_one() for _ in range(2)]
    for reader, writer in taken:
        writer.write(PREFACE)
        assert (await anext(frames(reader)))[0] == SETTINGS
    reader, writer = await open_one()
    writer.write(PREFACE)
    assert [frame async for frame in frames(reader)] == []
    for _, one in [*taken, (reader, writer)]:
        one.close()


async def test_messages_are_bounded_by_port(narrow: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{narrow}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="x" * 101), timeout=100
            )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_every_option_has_a_name_that_grpc_knows() -> None:
    """It takes no notice of any other, and says nothing."""
    known = Path(cygrpc.__file__).read_bytes()
    limits = ("grpc.max_allowed_incoming_connections", "grpc.max_concurrent_streams")
    for name in [*limits, *dict(SERVER_OPTIONS), *dict(CHANNEL_OPTIONS)]:
        assert name.encode() + b"\0" in known, name


@pytest.mark.parametrize("streams", [True, False])
async def test_an_error_of_the_tree_arrives_whole_and_another_is_masked(
    channel: grpc.aio.Channel, streams: bool
) -> None:
    async def fail(how: str) -> SealringError:
        stub = inference(channel)
        if streams:
            return await failure(stub.Generate(inference_pb2.GenerateRequest(model=how)))
        return await failure(stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("how", how),)))

    error = await fail("unknown")
    assert type(error) is NotFound
    said = (error.reason, error.message, error.hint, error.metadata)
    assert said == ("NOT_FOUND", "no model unknown", "see sealring status", {"param": "model", "known": "2"})
    error = await fail("bug")
    assert (type(error), error.message) == (Internal, "an internal error")


async def test_health_is_checked_and_watched() -> None:
    async with served() as (server, port), connected(port) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", INFERENCE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize("strangers", [False, True])
async def test_reflection_lists_the_services_but_not_to_strangers(strangers: bool) -> None:
    async with served(port=JOINING if strangers else Port()) as (_, port), connected(port) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if strangers:
            code = (await failure(call)).code
            assert code in ("UNIMPLEMENTED", "INTERNAL"), "the latter if it ends while written to"
            return
        names = {one.name async for answer in call for one in answer.list_services_response.service}
        assert {INFERENCE, "sealring.v1.Membership", "grpc.health.v1.Health"} <= names


async def test_a_port_to_strangers_counts_before_it_decodes() -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * (MAX_FIELDS + 1))
    prompt = inference_pb2.Prompt(chat=chat)
    request = inference_pb2.GenerateRequest(envelope=inference_pb2.Envelope(clear=prompt))
    async with served(port=rpc.INFERENCE) as (_, port), connected(port) as channel:
        assert (await failure(inference(channel).Generate(request))).reason == "TOO_MANY_VALUES"
        assert await anext(aiter(inference(channel).Generate(inference_pb2.GenerateRequest())))
