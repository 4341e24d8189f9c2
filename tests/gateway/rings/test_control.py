"""Control streams to the members of a ring that another process plays."""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from patience import until

from sealring.gateway.rings import control
from sealring.gateway.rings.control import MAX_RESPONSE, ControlStreams, MemberTarget, parse_response
from sealring.mesh.clock import awake_clock
from sealring.mesh.errors import EpochEnded, SealringError
from sealring.mesh.member.proof import Credentials, by_identity
from sealring.mesh.member.roster_keeper import RosterKeeper
from sealring.mesh.member.state import load_machine_state
from sealring.mesh.pki.certificates import Role
from sealring.mesh.rpc.tls import PeerChannel, TlsStore
from sealring.v1 import control_pb2, inference_pb2, membership_pb2


def open_streams(cluster: Any, before: tuple[str, ...] = ()) -> tuple[ControlStreams, list[PeerChannel]]:
    """Streams to every member, and the channels of it; `before` are addresses tried first."""
    store = TlsStore(cluster.material(cluster.peer(cluster.gateway, Role.GATEWAY)))
    peers = [cluster.peer(signer, Role.MEMBER) for signer in cluster.members]
    targets = [
        MemberTarget(
            peer.id,
            signer.public_key,
            tuple(
                PeerChannel(address, store, peer.server_name) for address in (*before, f"127.0.0.1:{port}")
            ),
        )
        for peer, signer, port in zip(peers, cluster.members, cluster.ports, strict=True)
    ]
    state = load_machine_state(cluster.state_dir)
    keeper = RosterKeeper(cluster.state_dir, state)
    keeper.load()
    identity = Credentials(
        state.peer.cluster, state.peer.id, by_identity(cluster.gateway), lambda: keeper.held
    )
    channels = [channel for target in targets for channel in target.channels]
    return ControlStreams("ring-0", 1, targets, identity), channels


def test_what_streams_are_before_anything_was_heard() -> None:
    plain = ControlStreams("ring-0", 4, [], None)  # type: ignore[arg-type]
    assert (plain.guest, plain.out_of_memory) == (False, False)
    assert plain.attach_request == control_pb2.Attach(ring="ring-0", epoch=4)
    asked = ControlStreams("ring-0", 4, [], None, clear_links=True, yields=True)  # type: ignore[arg-type]
    assert asked.attach_request == control_pb2.Attach(ring="ring-0", epoch=4, clear_links=True, yields=True)


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


async def test_an_address_that_swallows_everything_does_not_hide_the_next(
    make_cluster: Any, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.gateway.rings.control.ATTACH_SECONDS", 4.0)
    cluster = await make_cluster(1)
    streams, channels = open_streams(cluster, (silent_address,))
    async with asyncio.timeout(200):
        assert len(await streams.attach()) == 1
    streams.cancel()
    for channel in channels:
        await channel.close()


async def test_streams_that_have_ended_hold_no_call(make_cluster: Any) -> None:
    """Else the connection of an epoch stayed beside that of the next one."""
    cluster = await make_cluster(1)
    streams, channels = open_streams(cluster)
    await streams.attach()
    call = weakref.ref(streams.streams[0].call)
    streams.cancel()

    def let_go() -> bool:
        gc.collect()
        return call() is None

    await until(let_go)
    await channels[0].close()


class TornCall:
    """A call that its other end has ended: gRPC refuses a write at once, and what came before it is read."""

    def __init__(self) -> None:
        self._refused = asyncio.Event()

    async def write(self, _: bytes) -> None:
        self._refused.set()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def read(self) -> Any:
        await self._refused.wait()
        await asyncio.sleep(0)
        problem = membership_pb2.Problem(code="ABORTED", reason="RECORD_REFUSED")
        return control_pb2.ScheduleResponse(fault=membership_pb2.EpochFault(problem=problem))

    def cancel(self) -> None: ...


async def test_a_member_that_ends_the_stream_while_it_is_written_to_tells_why(make_cluster: Any) -> None:
    cluster = await make_cluster(1)
    streams, channels = open_streams(cluster)
    await streams.attach()
    (stream,) = streams.streams
    stream.cancel()
    stream.call = TornCall()
    with pytest.raises(SealringError) as raised:
        async with asyncio.timeout(200):
            await streams.run(lambda response: None)
    assert raised.value.reason == "RECORD_REFUSED"
    await channels[0].close()


async def test_a_channel_that_is_replaced_ends_the_epoch_with_a_reason(make_cluster: Any) -> None:
    """The certificate has ended; once, the error had no reason then."""
    cluster = await make_cluster(2)
    streams, channels = open_streams(cluster)
    assert len(await streams.attach()) == 2
    heard = asyncio.Event()
    running = asyncio.create_task(streams.run(lambda response: heard.set()))
    async with asyncio.timeout(200):
        await heard.wait()
        await channels[1].close()
        with pytest.raises(EpochEnded) as raised:
            await running
    assert raised.value.reason == "CHANNEL_REPLACED"
    assert raised.value.metadata["member"] == cluster.peer(cluster.members[1], Role.MEMBER).id
    streams.cancel()
    await channels[0].close()


async def test_a_gateway_that_was_held_up_calls_nobody_silent(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it looks, a hundred seconds have passed; they count as soon as it was awake for them."""
    monkeypatch.setattr("sealring.gateway.rings.control.PING_SECONDS", 0.01)
    cluster = await make_cluster(2)
    streams, channels = open_streams(cluster)
    await streams.attach()
    monkeypatch.setattr(awake_clock, "_clock", itertools.count(1e9, 100.0).__next__)
    monkeypatch.setattr(awake_clock, "_step", 0.0)
    pongs: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(streams.run(pongs.put_nowait))
    async with asyncio.timeout(200):
        for _ in range(20):
            await pongs.get()
        assert not running.done()
        monkeypatch.setattr(awake_clock, "_step", 100.0)
        with pytest.raises(EpochEnded) as raised:
            await running
    assert raised.value.reason == "MEMBER_SILENT"
    streams.cancel()
    for channel in channels:
        await channel.close()


async def test_the_streams_of_an_epoch_outlive_the_certificate_that_they_were_opened_with(
    make_cluster: Any,
) -> None:
    """Every member is shown every later one, on its own stream."""
    cluster = await make_cluster(2)
    streams, channels = open_streams(cluster)
    assert len(await streams.attach()) == 2
    running = asyncio.create_task(streams.run(lambda response: None))
    async with asyncio.timeout(200):
        for _ in range(2):
            newer = cluster.material(cluster.peer(cluster.gateway, Role.GATEWAY))
            channels[0]._store.replace(newer)
            for rank in range(2):
                assert await cluster.ring.renewed[rank].get() == newer.certificate
    assert not running.done()
    running.cancel()
    await asyncio.wait((running,))
    streams.cancel()
    for channel in channels:
        await channel.close()


class Call:
    """A stream whose other end this test plays."""

    def __init__(self, *said: control_pb2.ScheduleResponse) -> None:
        self.said = list(said)
        self.written: list[control_pb2.ScheduleRequest] = []
        self.events: list[str] = []

    async def read(self) -> Any:
        return self.said.pop(0) if self.said else await asyncio.Event().wait()

    async def write(self, message: bytes) -> None:
        self.written.append(control_pb2.ScheduleRequest.FromString(message))

    async def done_writing(self) -> None:
        self.events.append("done")

    def cancel(self) -> None:
        self.events.append("cancelled")


class Time:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def played(*calls: Call) -> tuple[ControlStreams, Time]:
    """Control streams that are such calls."""
    clock = Time()
    targets = [MemberTarget(f"m{rank}", b"", ()) for rank in range(len(calls))]
    streams = ControlStreams("ring-0", 4, targets, None, clear_links=True, yields=True, clock=clock)  # type: ignore[arg-type]
    for stream, call in zip(streams.streams, calls, strict=True):
        stream.call = call
    return streams, clock


ATTACHED = control_pb2.ScheduleResponse(attached=control_pb2.Attached(ring="ring-0", epoch=4))


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


class Refused(Call):
    """A call that fails to be introduced, and that gRPC has ended in some way."""

    def __init__(self, error: Exception, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        super().__init__(grpc.aio.EOF)
        self.error = error
        self._code = code

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "why"

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata


class Ended(Refused):
    """One whose reading fails as well."""

    async def read(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("calls", "reason", "tried"),
    [
        ([], "MEMBER_UNREACHABLE", 0),
        ([Call(ATTACHED)], "", 1),
        ([Refused(refusal(grpc.StatusCode.UNAVAILABLE)), Call(ATTACHED)], "", 2),
        ([Refused(TimeoutError()), Call(ATTACHED)], "", 2),
        ([Refused(TimeoutError())], "MEMBER_SILENT", 1),
        ([Refused(refusal(grpc.StatusCode.UNAUTHENTICATED)), Call(ATTACHED)], "UNAUTHENTICATED", 1),
        ([Refused(asyncio.InvalidStateError(), grpc.StatusCode.ABORTED), Call(ATTACHED)], "ABORTED", 1),
        ([Refused(asyncio.InvalidStateError(), grpc.StatusCode.UNAVAILABLE), Call(ATTACHED)], "", 2),
        ([Refused(asyncio.InvalidStateError())], "EPOCH_ENDED", 1),
        ([Call(grpc.aio.EOF), Call(ATTACHED)], "EPOCH_ENDED", 1),
        ([Call(control_pb2.ScheduleResponse(goodbye=membership_pb2.Goodbye()))], "MEMBER_LEFT", 1),
    ],
)
async def test_a_member_is_attached_to_at_the_first_address_that_answers(
    calls: list[Any], reason: str, tried: int
) -> None:
    """The call before is cancelled; who refuses is not asked elsewhere."""
    opened: list[Call] = []

    def channel(call: Call) -> Any:
        def open_call() -> Call:
            opened.append(call)
            return call

        return SimpleNamespace(get=lambda: SimpleNamespace(stream_stream=lambda *_, **__: open_call))

    async def prove(_: Any) -> Any:
        if isinstance(opened[-1], Refused):
            raise opened[-1].error

    streams, _ = played(Call())
    (stream,) = streams.streams
    stream.call = None
    stream.prove = prove  # type: ignore[method-assign]
    stream.target = MemberTarget("m0", b"", tuple(channel(call) for call in calls))
    if reason:
        with pytest.raises(SealringError) as caught:
            await stream.attach(control_pb2.Attach(ring="ring-0"))
        assert caught.value.reason == reason
        if reason == "EPOCH_ENDED":
            assert caught.value.metadata["member"] == "m0"
    else:
        assert await stream.attach(control_pb2.Attach(ring="ring-0")) == ATTACHED.attached
        assert [message.attach.ring for message in opened[-1].written] == ["ring-0"]
    assert [call.events for call in opened] == [["cancelled"]] * (tried - 1) + [[]] * bool(tried)


async def test_why_a_call_has_ended_is_told_though_it_cannot_be_read() -> None:
    call = Ended(refusal(grpc.StatusCode.ABORTED), grpc.StatusCode.ABORTED)
    streams, _ = played(call)
    assert (await streams.streams[0].failure()).code == "ABORTED"


@pytest.mark.parametrize("own", [True, False])
async def test_a_call_that_is_cancelled_was_replaced_unless_it_is_this_task(own: bool) -> None:
    class Cancelled(Call):
        async def write(self, _: bytes) -> None:
            if own:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            raise asyncio.CancelledError

    streams, _ = played(Cancelled())
    (stream,) = streams.streams
    stream.send(b"")
    writing = asyncio.ensure_future(stream.write_all())
    await asyncio.wait((writing,))
    assert writing.cancelled() is own
    if not own:
        assert getattr(writing.exception(), "reason", "") == "CHANNEL_REPLACED"


PONG = control_pb2.ScheduleResponse(pong=control_pb2.Pong(sequence=1))
DONE = control_pb2.ScheduleResponse(done=control_pb2.StepDone(step=1))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (control_pb2.ScheduleResponse(goodbye=membership_pb2.Goodbye()), "MEMBER_LEFT"),
        (control_pb2.ScheduleResponse(attached=control_pb2.Attached()), "BAD_MESSAGE"),
        (control_pb2.ScheduleResponse(), "BAD_MESSAGE"),
    ],
)
async def test_what_members_say_is_handed_on_pongs_of_the_head_only(
    last: control_pb2.ScheduleResponse, reason: str
) -> None:
    streams, clock = played(Call(PONG, DONE, last), Call(PONG, DONE, last))
    clock.now += 3
    for stream, heard in zip(streams.streams, (["pong", "done"], ["done"]), strict=True):
        told: list[Any] = []
        with pytest.raises(EpochEnded) as caught:
            await stream.read_all(lambda response, told=told: told.append(response.WhichOneof("message")))
        assert (caught.value.reason, caught.value.metadata["member"]) == (reason, stream.target.id)
        assert (told, stream.heard) == (heard, clock.now)
        assert stream.read_out.is_set()


async def test_a_goodbye_is_the_last_thing_that_is_said() -> None:
    head, other = Call(), Call()
    streams, _ = played(head, other)
    written: list[int] = []
    step = control_pb2.ScheduleRequest(step=control_pb2.Step(number=1)).SerializeToString()
    discard = control_pb2.ScheduleRequest(discard=control_pb2.DiscardRow(row=2)).SerializeToString()
    streams.send_all(step)
    streams.send_head(discard, lambda: written.append(len(head.written)))
    for stream in streams.streams:
        stream.finish("LEAVING")
        stream.send(step)
        async with asyncio.timeout(200):
            await stream.write_all()
    said = [[message.WhichOneof("message") for message in call.written] for call in (head, other)]
    assert said == [["step", "discard", "goodbye"], ["step", "goodbye"]]
    assert (head.written[-1].goodbye.reason, written, head.events) == ("LEAVING", [2], ["done"])
    streams.cancel()
    assert other.events == ["done", "cancelled"]


class Late(Call):
    """It says why it ends once it is left."""

    def __init__(self) -> None:
        super().__init__()
        self._left = asyncio.Event()

    async def read(self) -> Any:
        await self._left.wait()
        problem = membership_pb2.Problem(code="ABORTED", reason="OUT_OF_MEMORY")
        return control_pb2.ScheduleResponse(fault=membership_pb2.EpochFault(problem=problem))

    async def done_writing(self) -> None:
        self._left.set()


@pytest.mark.parametrize("told_first", [True, False])
async def test_the_member_without_memory_is_heard_after_another_end_of_the_epoch(told_first: bool) -> None:
    """Another member's, or the coordinator's word, for which the gateway's task is cancelled."""
    last = [control_pb2.ScheduleResponse(goodbye=membership_pb2.Goodbye())]
    streams, _ = played(Call(*(last if told_first else [])), Late())
    running = asyncio.ensure_future(streams.run(lambda response: None))
    await asyncio.sleep(0)
    if not told_first:
        running.cancel()
    await asyncio.wait((running,))
    assert running.cancelled() is not told_first
    assert streams.out_of_memory


@pytest.mark.parametrize(("rank", "ring", "epoch"), [(1, "ring-0", 4), (0, "other", 4), (0, "ring-0", 5)])
async def test_members_attach_to_what_they_were_asked_for(rank: int, ring: str, epoch: int) -> None:
    streams, _ = played(Call(), Call())
    answers = [control_pb2.Attached(ring="ring-0", epoch=4, rank=each) for each in range(2)]

    async def attach(*asked: Any) -> Any:
        assert asked == (control_pb2.Attach(ring="ring-0", epoch=4, clear_links=True, yields=True),)
        return next(given)

    for stream in streams.streams:
        stream.attach = attach  # type: ignore[method-assign]
    given = iter(answers)
    assert await streams.attach() == answers
    given = iter([control_pb2.Attached(ring=ring, epoch=epoch, rank=rank), answers[1]])
    with pytest.raises(EpochEnded) as caught:
        await streams.attach()
    assert caught.value.reason == "WRONG_MEMBER"


async def test_members_that_are_silent_and_rings_that_stall_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limits run by the streams' own clock; an answer in between starts them again."""

    async def found(streams: ControlStreams, clock: Time, *, silent: int | None = None) -> tuple[str, float]:
        begun = clock.now

        async def rest(seconds: float) -> None:
            clock.now += seconds
            for rank, stream in enumerate(streams.streams):
                if rank != silent:
                    stream.heard = clock.now

        with monkeypatch.context() as patched, pytest.raises(EpochEnded) as caught:
            patched.setattr(asyncio, "sleep", rest)
            await streams.watch()
        return caught.value.reason, clock.now - begun

    streams, clock = played(Call(), Call())
    assert await found(streams, clock, silent=1) == ("MEMBER_SILENT", control.PONG_SECONDS + 1)
    sent = [control_pb2.ScheduleRequest.FromString(message) for message, _ in streams.streams[1].outgoing]
    assert [message.ping.sequence for message in sent] == [1, 2, 3, 4, 5, 6]
    streams, clock = played(Call())
    streams.expect()
    streams.answered()
    streams.expect()
    clock.now += 10
    streams.expect()
    assert await found(streams, clock) == ("RING_STALLED", control.STALL_SECONDS - 10 + 1)


async def test_a_record_that_is_lost_ends_the_epoch_and_names_who_sent_it() -> None:
    streams, clock = played(Call(), Call(), Call())
    sent = control_pb2.Pong(records_sent=7)
    waits = control_pb2.Pong(records_received=6, waiting_ms=3000)
    streams.pong(1, sent)
    streams.pong(2, waits)
    clock.now += 3
    with pytest.raises(EpochEnded) as caught:
        streams.pong(2, waits)
    assert (caught.value.reason, caught.value.metadata["member"]) == ("RECORD_LOST", "m1")


def test_what_a_member_says_is_bounded_before_it_is_parsed() -> None:
    """By its bytes, and by the fields that each cost an object: an empty output has two bytes."""
    logged = [inference_pb2.TokenLogprob(id=1, spelling=b"x" * 10, logprob=-1.0)] * 15_000
    output = control_pb2.RowOutput(row=1, text="x" * 100, logprobs=logged)
    done = control_pb2.ScheduleResponse(done=control_pb2.StepDone(step=1, outputs=[output] * 4))
    assert len(done.SerializeToString()) > 1 << 20
    assert parse_response(done.SerializeToString()) == done
    prompt = inference_pb2.Envelope(clear=inference_pb2.Prompt(text="x" * MAX_RESPONSE))
    forward = control_pb2.ScheduleResponse(
        forward=control_pb2.Forward(number=1, request=inference_pb2.GenerateRequest(envelope=prompt))
    )
    assert parse_response(forward.SerializeToString()) == forward
    for refused in (
        control_pb2.StepDone(step=1, outputs=[control_pb2.RowOutput()] * (1 << 20)),
        control_pb2.StepDone(step=1, outputs=[control_pb2.RowOutput(text="x" * MAX_RESPONSE)]),
    ):
        message = control_pb2.ScheduleResponse(done=refused).SerializeToString()
        assert parse_response(message) == control_pb2.ScheduleResponse()
    assert parse_response(b"\xff") == control_pb2.ScheduleResponse()
