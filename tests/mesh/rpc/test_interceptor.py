"""Refusals, as callers over real connections read them; what else it does is in test_rpc.py."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from leaftest import material

from sealring.mesh.clock import SKEW_SECONDS, wall_clock
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, to_pem
from sealring.mesh.rpc import (
    ErrorInterceptor,
    Lease,
    Server,
    TlsStore,
    channel_options,
    from_rpc_error,
    interceptor,
    secure_channel,
    server_credentials,
    stream_lease,
)
from sealring.v1 import membership_pb2, membership_pb2_grpc


class Membership(membership_pb2_grpc.MembershipServicer):
    """Any stream would do: it refuses every caller before it reads anything, and plays no coordinator."""

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        raise PermissionDenied("not you", reason="NOT_A_MEMBER")
        yield


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    authority = ClusterCA.create(tmp_path / "ca", "demo", now=wall_clock())
    main = PeerIdentity("demo", Role.COORDINATOR, "main")
    member = "sealring.v1.Membership"
    server = Server([(membership_pb2_grpc.add_MembershipServicer_to_server, Membership(), member)])
    port = server.listen("127.0.0.1:0", server_credentials(TlsStore(material(authority, main))))
    await server.start()
    address, options = f"127.0.0.1:{port}", channel_options(main.server_name)
    async with secure_channel(address, material(authority), options) as channel:
        yield channel
    await server.stop(0)
    await server.wait()


async def test_a_caller_that_writes_meanwhile_reads_why_it_is_refused(channel: grpc.aio.Channel) -> None:
    """gRPC makes INTERNAL of it where the refusal meets the first write; 1 in 7 of these did."""
    stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
    for number in range(100):
        call = stub.Session()
        await asyncio.sleep(number % 10 * 2e-4)
        await call.write(membership_pb2.MemberMessage())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == "NOT_A_MEMBER"


async def test_a_caller_that_says_nothing_is_refused_all_the_same(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.mesh.rpc.interceptor.FIRST_SECONDS", 0.1)
    stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
    for ends in (False, True):
        call = stub.Session(timeout=100)
        if ends:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == "NOT_A_MEMBER"


NOW = 1_800_000_000
ENDS = NOW + 600


class Aborted(Exception):
    """In the place of grpc's own."""


class Call:
    """A stream of a caller with or without a certificate, which sends one request."""

    def __init__(self, tmp_path: Path, *, certified: bool = True) -> None:
        ca = ClusterCA.create(tmp_path / "ca", "demo", now=NOW)
        peer = PeerIdentity("demo", Role.MEMBER, "one")
        leaf = ca.issue(LeafKey().csr(), peer, lifetime=ENDS - NOW, now=NOW)
        self._shown = {"x509_pem_cert": [to_pem(leaf)]} if certified else {}
        self.asked = 0
        self.reason = ""

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown

    async def abort_with_status(self, status: Any) -> None:
        details = status_pb2.Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        details.details[0].Unpack(info)
        self.reason = info.reason
        raise Aborted

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.asked += 1
        return b"first"

    async def answers(self, handler: Any, *, streaming: bool = True) -> list[Any]:
        """The handler's answers until it ends or is ended."""
        request: Any = self if streaming else b"only"
        context: Any = self
        kind = "stream_stream" if streaming else "unary_stream"
        made = getattr(grpc, f"{kind}_rpc_method_handler")(handler)

        async def serving(_details: Any) -> Any:
            return made

        details: Any = SimpleNamespace(method="/x")
        guarded = await ErrorInterceptor().intercept_service(serving, details)
        answers = getattr(guarded, kind)(request, context)
        found = []
        with contextlib.suppress(Aborted):
            async for answer in answers:
                found.append(answer)
        return found


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock."""
    now = [float(NOW)]
    monkeypatch.setattr(interceptor, "wall_clock", lambda: now[0])
    return lambda to: now.__setitem__(0, to)


@pytest.mark.parametrize(
    ("certified", "streaming", "reads", "asked"),
    [
        (True, True, False, 1),
        (True, True, True, 1),
        (False, True, False, 0),
        (True, False, False, 0),
    ],
    ids=["says why after the first request", "which was read", "to strangers at once", "no stream"],
)
async def test_a_refusal_waits_for_the_first_request_and_for_no_other(
    tmp_path: Path, at: Any, certified: bool, streaming: bool, reads: bool, asked: int
) -> None:
    async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests) if reads else b"hello"
        raise PermissionDenied("not you", reason="NOT_A_MEMBER")

    call = Call(tmp_path, certified=certified)
    assert await call.answers(refuse, streaming=streaming) == [b"first" if reads else b"hello"]
    assert (call.reason, call.asked) == ("NOT_A_MEMBER", asked)


async def test_a_stream_ends_with_its_certificate(tmp_path: Path, at: Any) -> None:
    begun = []

    async def endless(requests: Any, context: Any) -> AsyncIterator[bytes]:
        begun.append(stream_lease.get().ends)
        await asyncio.Event().wait()
        yield b""

    for now, starts in ((ENDS + SKEW_SECONDS - 0.01, 1), (ENDS + SKEW_SECONDS, 1)):
        at(now)
        call = Call(tmp_path / str(now))
        async with asyncio.timeout(200):
            assert await call.answers(endless) == []
        assert call.reason == "CERTIFICATE_EXPIRED"
        assert begun == [ENDS] * starts


async def test_a_time_that_is_over_elsewhere_is_no_certificates(tmp_path: Path, at: Any) -> None:
    async def late(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"x"
        raise TimeoutError

    call = Call(tmp_path)
    assert await call.answers(late) == [b"x"]
    assert call.reason == "INTERNAL"


async def test_a_stream_without_a_certificate_does_not_end(tmp_path: Path, at: Any) -> None:
    async def brief(requests: Any, context: Any) -> AsyncIterator[bytes]:
        assert stream_lease.get().ends == math.inf
        yield b"x"

    call = Call(tmp_path, certified=False)
    assert (await call.answers(brief), call.reason) == ([b"x"], "")


async def test_a_lease_only_grows_and_an_ended_one_not_at_all(at: Any) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        lease = Lease(limit, NOW + 100)
        for ends, counts in ((NOW + 200, NOW + 200), (NOW + 150, NOW + 200), (math.inf, math.inf)):
            lease.extend(ends)
            assert lease.ends == counts
            when = limit.when()
            if counts is math.inf:
                assert when is None
            else:
                assert when == pytest.approx(loop.time() + counts + SKEW_SECONDS - NOW, abs=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            lease = Lease(limit, NOW - 2 * SKEW_SECONDS)
            try:
                await asyncio.Event().wait()
            finally:
                lease.extend(NOW + 100)
                assert lease.ends == NOW - 2 * SKEW_SECONDS


async def test_what_nobody_serves_has_no_handler() -> None:
    async def nobody(details: Any) -> None:
        return None

    details: Any = None
    assert await ErrorInterceptor().intercept_service(nobody, details) is None
