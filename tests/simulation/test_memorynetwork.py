"""gRPC in memory behaves as gRPC over TLS does: each of these tests runs over both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from leaftest import material
from memorynetwork import WINDOW_BYTES, Network, Process

from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import InvalidInput
from sealring.mesh.pki import ClusterCA, PeerIdentity, Role
from sealring.mesh.rpc import (
    Server,
    TlsStore,
    channel_options,
    from_rpc_error,
    peer_identity,
    secure_channel,
    server_credentials,
)

SERVICE = "test.Service"
SERVER = PeerIdentity("demo", Role.MEMBER, "server")
CLIENT = PeerIdentity("demo", Role.GATEWAY, "client")
Ask = Callable[[grpc.aio.Channel], Coroutine[Any, Any, None]]


class Bed:
    """A server and a client, each in a process of its own where the network is in memory."""

    def __init__(self, folder: Path, *, in_memory: bool) -> None:
        self.ca = ClusterCA.create(folder, "demo", now=wall_clock())
        self.network = Network(random.Random(1)) if in_memory else None
        self.server: Server | None = None
        self.processes: dict[str, Process] = {}

    async def in_process(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        if self.network is None:
            return await work
        made = self.processes.get(name) or Process(name, f"10.0.0.{len(name)}", self.network)
        self.processes[name] = made
        return await asyncio.get_running_loop().create_task(work, context=made.context)

    async def over(self, ask: Ask, *, peer: PeerIdentity = CLIENT, name: str = "", **methods: Any) -> None:
        """Serves `methods`, and calls `ask` with a channel."""
        port = await self.in_process("server", self._serve(methods))

        async def client() -> None:
            host = "127.0.0.1" if self.network is None else self.processes["server"].host
            options = channel_options(name or SERVER.server_name)
            async with secure_channel(f"{host}:{port}", material(self.ca, peer), options) as channel:
                await ask(channel)

        try:
            async with asyncio.timeout(60):
                await self.in_process("client", client())
        finally:
            assert self.server is not None
            await self.in_process("server", self.server.stop(0.0))

    async def _serve(self, methods: dict[str, Any]) -> int:
        kinds = {"uu": "unary_unary", "us": "unary_stream", "su": "stream_unary", "ss": "stream_stream"}
        handlers = {
            name: getattr(grpc, f"{kinds[name[:2]]}_rpc_method_handler")(handle)
            for name, handle in methods.items()
        }

        def add(_: object, server: Any) -> None:
            server.add_registered_method_handlers(SERVICE, handlers)

        self.server = Server([(add, None, SERVICE)])
        port = self.server.listen("127.0.0.1:0", server_credentials(TlsStore(material(self.ca, SERVER))))
        await self.server.start()
        return port


@pytest.fixture(params=[False, True], ids=["TLS", "memory"])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Bed:
    return Bed(tmp_path / "ca", in_memory=request.param)


def call(channel: grpc.aio.Channel, name: str, *arguments: Any, **named: Any) -> Any:
    kinds = {"uu": "unary_unary", "us": "unary_stream", "su": "stream_unary", "ss": "stream_stream"}
    return getattr(channel, kinds[name[:2]])(f"/{SERVICE}/{name}")(*arguments, **named)


async def failure(awaited: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaited
    return caught.value


async def test_calls_of_each_kind_are_answered(bed: Bed) -> None:
    async def twice(request: bytes, context: Any) -> bytes:
        return request * 2

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    async def joined(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([one async for one in requests])

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in requests:
            yield one

    async def each(channel: grpc.aio.Channel) -> None:
        assert await call(channel, "uu", b"ab") == b"abab"
        assert [one async for one in call(channel, "us", b"3")] == [b"0", b"1", b"2"]
        assert await call(channel, "su", iter([b"a", b"b"])) == b"ab"
        stream = call(channel, "ss")
        for sent in (b"x", b"", b"y" * 1000):
            await stream.write(sent)
            assert await stream.read() == sent
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await stream.write(b"late")

    await bed.over(each, uu=twice, us=count, su=joined, ss=echo)


async def test_errors_come_with_their_details(bed: Bed) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise InvalidInput("not this", hint="that", reason="BAD_THING", param="it")

    async def break_off(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise ValueError("a secret")

    async def each(channel: grpc.aio.Channel) -> None:
        error = from_rpc_error(await failure(call(channel, "uu", b"")))
        assert (error.reason, error.message, error.hint) == ("BAD_THING", "not this", "that")
        stream = call(channel, "us", b"")
        assert await stream.read() == b"first"
        hidden = await failure(stream.read())
        assert hidden.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (hidden.details() or "")
        assert (await failure(call(channel, "uuNone", b""))).code() is grpc.StatusCode.UNIMPLEMENTED

    await bed.over(each, uu=refuse, us=break_off)


async def test_either_end_learns_that_the_other_has_ended_a_call(bed: Bed) -> None:
    left = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"here"
            await asyncio.Event().wait()
        finally:
            left.set()

    async def leave(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(requests)
        yield b"last"

    async def each(channel: grpc.aio.Channel) -> None:
        stream = call(channel, "ss")
        assert await stream.read() == b"here"
        stream.cancel()
        await left.wait()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        left.clear()
        stream = call(channel, "ss")
        await stream.read()
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        await left.wait()
        over = call(channel, "ssLeave")
        await over.write(b"")
        assert [await over.read(), await over.read()] == [b"last", grpc.aio.EOF]
        with pytest.raises(asyncio.InvalidStateError):
            await over.write(b"")
        late = call(channel, "ssNever", timeout=0.05)
        assert (await failure(late.read())).code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def never(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    await bed.over(each, ss=wait, ssLeave=leave, ssNever=never)


async def test_a_writer_waits_for_a_reader_that_is_behind(bed: Bed) -> None:
    written: list[int] = []

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(64):
            yield bytes(WINDOW_BYTES // 2)
            written.append(number)

    async def each(channel: grpc.aio.Channel) -> None:
        stream = call(channel, "us", b"")
        await stream.read()
        if bed.network is not None:  # the system's buffers take more
            await asyncio.sleep(0.05)
            assert len(written) < 4
        rest = [await stream.read() for _ in range(63)]
        assert grpc.aio.EOF not in rest
        assert await stream.read() is grpc.aio.EOF

    await bed.over(each, us=flood)


async def test_a_caller_is_who_its_certificate_says(bed: Bed) -> None:
    async def who(request: bytes, context: Any) -> bytes:
        return str(peer_identity(context).id).encode()

    async def each(channel: grpc.aio.Channel) -> None:
        assert await call(channel, "uu", b"") == b"client"

    await bed.over(each, uu=who)

    async def refused(channel: grpc.aio.Channel) -> None:
        assert (await failure(call(channel, "uu", b""))).code() is grpc.StatusCode.UNAVAILABLE

    await bed.over(refused, name="another.sealring", uu=who)


async def test_a_server_that_stops_ends_its_calls(bed: Bed) -> None:
    async def wait(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"here"
        await asyncio.Event().wait()

    async def each(channel: grpc.aio.Channel) -> None:
        stream = call(channel, "ss")
        assert await stream.read() == b"here"
        assert bed.server is not None
        stopping = asyncio.create_task(bed.in_process("server", bed.server.stop(0.0)))
        error = await failure(stream.read())
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        await stopping
        assert (await failure(call(channel, "ss").read())).code() is grpc.StatusCode.UNAVAILABLE
        assert channel.get_state() is not grpc.ChannelConnectivity.READY

    await bed.over(each, ss=wait)
