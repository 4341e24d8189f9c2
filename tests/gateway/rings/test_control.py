"""Control streams to the members of a ring that another process plays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from patience import until

from sealring.gateway.rings import control
from sealring.gateway.rings.control import (
    LOST_SECONDS,
    MAX_RESPONSE,
    ControlStreams,
    LossWatch,
    Unheard,
    parse_response,
)
from sealring.gateway.rings.members import Members, MemberTarget
from sealring.mesh.clock import AwakeClock
from sealring.mesh.errors import EpochEnded, SealringError, Unavailable
from sealring.mesh.member import Credentials, HeldRoster, RosterKeeper, by_identity, load_machine_state
from sealring.mesh.pki import Role
from sealring.mesh.rpc import PIECE_BYTES, TlsStore, reach, to_status
from sealring.testing import ManualClock
from sealring.v1 import control_pb2, inference_pb2, membership_pb2


class Bed:
    """Streams over real connections to the members of a played cluster, by rank in `order`."""

    def __init__(
        self,
        cluster: Any,
        *,
        before: Sequence[str] = (),
        ring: str = "ring-0",
        order: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self.cluster = cluster
        self.store = TlsStore(cluster.material(cluster.peer(cluster.gateway, Role.GATEWAY)))
        self.ids = [cluster.peer(signer, Role.MEMBER).id for signer in cluster.members]
        targets = [
            MemberTarget(name, signer.public_key, (*before, f"127.0.0.1:{port}"))
            for name, signer, port in zip(self.ids, cluster.members, cluster.ports, strict=True)
        ]
        state = load_machine_state(cluster.state_dir)
        keeper = RosterKeeper(cluster.state_dir, state)
        keeper.load()
        proves = by_identity(cluster.gateway)
        identity = Credentials(state.peer.cluster, state.peer.id, proves, lambda: keeper.held)
        self.members = Members("demo", self.store, identity)
        ordered = [targets[rank] for rank in order or range(cluster.size)]
        self.streams = ControlStreams(ring, 1, ordered, self.members, **options)


@pytest.fixture
async def opened(make_cluster: Any) -> AsyncIterator[Callable[..., Any]]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(size: int = 1, **options: Any) -> Bed:
            bed = Bed(await make_cluster(size), **options)
            stack.push_async_callback(bed.members.close)
            stack.callback(bed.streams.cancel)
            return bed

        yield make


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


async def test_no_address_of_a_member_is_waited_for(
    opened: Any, silent_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 1000.0)
    bed = await opened(before=(silent_address,))
    async with asyncio.timeout(200):
        assert len(await bed.streams.attach()) == 1


@pytest.mark.parametrize("end", ["cancelled", "left", "wrong"])
async def test_streams_that_have_ended_hold_no_call(opened: Any, end: str) -> None:
    """Else the connections of an epoch stay beside those of the next one. Python does not look for garbage
    here, as an idle gateway seldom does."""
    bed = await opened(2, order=(1, 0) if end == "wrong" else ())
    gc.disable()
    try:
        calls = await attended(bed, end)
        await until(lambda: not any(call() for call in calls))
    finally:
        gc.enable()


async def attended(bed: Bed, end: str) -> list[weakref.ref[Any]]:
    """The calls of an epoch that has been and has ended."""
    calls = list[weakref.ref[Any]]()
    heard = asyncio.Event()

    async def attend() -> None:
        try:
            with contextlib.suppress(EpochEnded):
                await bed.streams.attach()
                await bed.streams.run(lambda response: heard.set())
        finally:
            calls.extend(weakref.ref(stream.call) for stream in bed.streams.streams)
            bed.streams.cancel()

    attending = asyncio.create_task(attend())
    async with asyncio.timeout(200):
        if end != "wrong":
            await heard.wait()
        if end == "left":
            bed.members.keep(bed.ids[:1])
        if end == "cancelled":
            attending.cancel()
        await asyncio.wait((attending,))
    return calls


async def test_the_stream_to_a_machine_that_is_no_member_any_more_ends_at_once(opened: Any) -> None:
    bed = await opened(2)
    assert len(await bed.streams.attach()) == 2
    heard = asyncio.Event()
    running = asyncio.create_task(bed.streams.run(lambda response: heard.set()))
    async with asyncio.timeout(200):
        await heard.wait()
        bed.members.keep(bed.ids[:1])
        with pytest.raises(EpochEnded) as raised:
            await running
    assert (raised.value.reason, raised.value.metadata["member"]) == ("CHANNEL_REPLACED", bed.ids[1])


@pytest.mark.parametrize(("counted", "silent"), [(0.0, False), (100.0, True)])
async def test_a_gateway_that_was_held_up_calls_nobody_silent(
    opened: Any, monkeypatch: pytest.MonkeyPatch, counted: float, silent: bool
) -> None:
    """Whenever it looks, a hundred seconds have passed; they count only if it was awake for them."""
    for pause in ("PING_SECONDS", "REST_SECONDS"):
        monkeypatch.setattr(control, pause, 0.01)
    clock = AwakeClock(itertools.count(1e9, 100.0).__next__, step=counted)
    bed = await opened(2, clock=clock)
    await bed.streams.attach()
    pongs: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(bed.streams.run(pongs.put_nowait))
    async with asyncio.timeout(200):
        if not silent:
            for _ in range(20):
                await pongs.get()
            assert not running.done()
            running.cancel()
        (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert getattr(ended, "reason", "") == ("MEMBER_SILENT" if silent else "")


async def test_the_streams_of_an_epoch_outlive_the_certificate_that_they_were_opened_with(
    opened: Any,
) -> None:
    """Every member is shown every later one, on its own stream."""
    bed = await opened(2)
    assert len(await bed.streams.attach()) == 2
    running = asyncio.create_task(bed.streams.run(lambda response: None))
    async with asyncio.timeout(200):
        for _ in range(2):
            newer = bed.cluster.material(bed.cluster.peer(bed.cluster.gateway, Role.GATEWAY))
            bed.store.replace(newer)
            for rank in range(2):
                assert await bed.cluster.ring.renewed[rank].get() == newer.certificate
    assert not running.done()
    running.cancel()
    await asyncio.wait((running,))


@pytest.mark.parametrize("wrong", [{"order": (1, 0)}, {"ring": "other"}])
async def test_members_attach_to_what_they_were_asked_for(opened: Any, wrong: dict[str, Any]) -> None:
    bed = await opened(2, **wrong)
    with pytest.raises(EpochEnded) as caught:
        await bed.streams.attach()
    assert caught.value.reason == "WRONG_MEMBER"


class Call:
    """A stream whose other end this test plays: it says `said`, then nothing until the gateway leaves, and
    notes what it is sent."""

    def __init__(self, *said: Any) -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        for each in said:
            self.says.put_nowait(each)
        self.written: list[control_pb2.ScheduleRequest] = []
        self.events: list[str] = []

    async def read(self) -> Any:
        return await self.says.get()

    async def write(self, message: bytes) -> None:
        self.written.append(control_pb2.ScheduleRequest.FromString(message))

    async def done_writing(self) -> None:
        self.events.append("done")
        self.says.put_nowait(GOODBYE)

    def cancel(self) -> None:
        self.events.append("cancelled")


class Renewals:
    """An introduction whose certificate is not renewed."""

    async def renewals(self) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield


NEVER_RENEWED: Any = Renewals()


def played(*calls: Call, **options: Any) -> tuple[ControlStreams, ManualClock]:
    """Control streams that are such calls."""
    clock, nobody = ManualClock(1000.0), None
    targets = [MemberTarget(f"m{rank}", b"", ()) for rank in range(len(calls))]
    streams = ControlStreams("ring-0", 4, targets, nobody, clock=clock, **options)  # type: ignore[arg-type]
    for stream, call in zip(streams.streams, calls, strict=True):
        stream.call, stream.introduced = call, NEVER_RENEWED
    return streams, clock


def fault(reason: str) -> control_pb2.ScheduleResponse:
    problem = membership_pb2.Problem(code="ABORTED", reason=reason)
    return control_pb2.ScheduleResponse(fault=membership_pb2.EpochFault(problem=problem))


GOODBYE = control_pb2.ScheduleResponse(goodbye=membership_pb2.Goodbye())


def rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


class Refused(Call):
    """A call that gRPC has ended with `code`, so that it takes nothing."""

    def __init__(self, error: BaseException, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        super().__init__(error, grpc.aio.EOF)
        self._code = code

    async def read(self) -> Any:
        answer = await super().read()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "why"

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata


INVALID = asyncio.InvalidStateError()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Refused(rpc_error(grpc.StatusCode.UNAVAILABLE)), "UNAVAILABLE"),
        (Refused(rpc_error(grpc.StatusCode.UNAUTHENTICATED)), "UNAUTHENTICATED"),
        (Refused(TimeoutError()), "MEMBER_SILENT"),
        (Refused(INVALID, grpc.StatusCode.ABORTED), "ABORTED"),
        (Refused(INVALID), "EPOCH_ENDED"),
    ],
)
async def test_an_attachment_that_fails_says_why(call: Refused, reason: str) -> None:
    opening = SimpleNamespace(stream_stream=lambda *_, **__: lambda: call)
    channel = SimpleNamespace(get=lambda: opening, key_hash=b"", renewed=lambda: None)
    released: list[Any] = []

    class Network:
        identity = Credentials("demo", "gateway", by_identity(None), HeldRoster)  # type: ignore[arg-type]

        async def connect(self, target: MemberTarget) -> Any:
            return channel

        release = released.append

    targets = [MemberTarget("m0", b"", ())]
    streams = ControlStreams("ring-0", 4, targets, Network())  # type: ignore[arg-type]
    with pytest.raises(SealringError) as caught:
        await streams.attach()
    assert caught.value.reason == reason
    streams.cancel()
    assert (call.events, len(released)) == (["cancelled"], 1)


def told(reason: str) -> grpc.aio.AioRpcError:
    """The status of a call that the member has ended itself."""
    status = rpc_status.to_status(to_status(Unavailable("no", reason=reason)))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


@pytest.mark.parametrize("early", [True, False])
async def test_a_fault_of_the_gateway_ends_streams_that_run_and_those_that_would(early: bool) -> None:
    call, fault = Call(), RuntimeError("a fault")
    streams, _ = played(call)
    if early:
        streams.fail(fault)
    running = asyncio.create_task(streams.run(lambda response: None))
    await asyncio.sleep(0)
    streams.fail(fault)
    with pytest.raises(RuntimeError) as raised:
        async with asyncio.timeout(200):
            await running
    assert raised.value is fault
    assert call.written[-1].WhichOneof("message") == "goodbye"


@pytest.mark.parametrize(
    ("call", "reason", "heard"),
    [
        (Refused(rpc_error(grpc.StatusCode.UNAVAILABLE)), "UNAVAILABLE", False),
        (Refused(rpc_error(grpc.StatusCode.INTERNAL)), "INTERNAL", False),
        (Refused(rpc_error(grpc.StatusCode.CANCELLED)), "CANCELLED", False),
        (Refused(asyncio.CancelledError()), "CHANNEL_REPLACED", False),
        (Refused(told("UNAVAILABLE")), "UNAVAILABLE", True),
        (Call(fault("UNAVAILABLE")), "UNAVAILABLE", True),
        (Call(fault("MEMBER_SILENT")), "MEMBER_SILENT", True),
        (Call(GOODBYE), "MEMBER_LEFT", True),
    ],
)
async def test_the_word_of_a_member_is_told_from_the_end_of_its_connection(
    call: Call, reason: str, heard: bool
) -> None:
    """A member that gives a reason has ended its epoch: nobody needs to go back to it."""
    streams, _ = played(call)
    with pytest.raises(SealringError) as caught:
        async with asyncio.timeout(200):
            await streams.run(lambda response: None)
    assert (caught.value.reason, not isinstance(caught.value, Unheard)) == (reason, heard)


async def test_a_member_that_ends_the_stream_while_it_is_written_to_tells_why() -> None:
    """gRPC refuses a write at once, and what came before it is read."""

    class Torn(Call):
        async def write(self, _: bytes) -> None:
            self.says.put_nowait(fault("RECORD_REFUSED"))
            raise rpc_error(grpc.StatusCode.INTERNAL)

    streams, _ = played(Torn())
    with pytest.raises(SealringError) as raised:
        async with asyncio.timeout(200):
            await streams.run(lambda response: None)
    assert raised.value.reason == "RECORD_REFUSED"


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
        (GOODBYE, "MEMBER_LEFT"),
        (control_pb2.ScheduleResponse(attached=control_pb2.Attached()), "BAD_MESSAGE"),
        (control_pb2.ScheduleResponse(), "BAD_MESSAGE"),
    ],
)
async def test_messages_of_members_are_handed_on_and_pongs_of_the_head_only(
    last: control_pb2.ScheduleResponse, reason: str
) -> None:
    streams, clock = played(Call(PONG, DONE, last), Call(PONG, DONE, last))
    clock.now += 3
    for stream, handed_on in zip(streams.streams, (["pong", "done"], ["done"]), strict=True):
        handled: list[Any] = []
        with pytest.raises(EpochEnded) as caught:
            await stream.read_all(lambda response, to=handled: to.append(response.WhichOneof("message")))
        assert (caught.value.reason, caught.value.metadata["member"]) == (reason, stream.target.id)
        assert (handled, stream.heard) == (handed_on, clock.now)


async def test_a_goodbye_is_the_last_message() -> None:
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
    sent = [[message.WhichOneof("message") for message in call.written] for call in (head, other)]
    assert sent == [["step", "discard", "goodbye"], ["step", "goodbye"]]
    assert (head.written[-1].goodbye.reason, written, head.events) == ("LEAVING", [2], ["done"])
    streams.cancel()
    assert other.events == ["done", "cancelled"]


async def test_pings_do_not_wait_for_a_long_prompt_and_a_goodbye_drops_it() -> None:
    class Slow(Call):
        async def write(self, message: bytes) -> None:
            await super().write(message)
            if len(self.written) == 1:
                streams.send_all(ping)
            elif len(self.written) == 3:
                streams.streams[0].finish("LEAVING")

    head = Slow()
    streams, _ = played(head)
    ping = control_pb2.ScheduleRequest(ping=control_pb2.Ping(sequence=1)).SerializeToString()
    streams.send_prompt(bytes(9 * PIECE_BYTES), key="one")
    streams.send_prompt(b"", key="two")
    assert streams.withdraw("two")
    async with asyncio.timeout(200):
        await streams.streams[0].write_all()
    assert [message.WhichOneof("message") for message in head.written] == [
        "piece",
        "ping",
        "piece",
        "goodbye",
    ]


async def test_a_guests_prompt_comes_in_pieces_and_nothing_else_does() -> None:
    request = inference_pb2.GenerateRequest(model="x" * PIECE_BYTES)
    forward = control_pb2.ScheduleResponse(forward=control_pb2.Forward(guest=1, number=1, request=request))
    data = forward.SerializeToString()
    parts = [control_pb2.Piece(data=data[:9]), control_pb2.Piece(data=data[9:], last=True)]
    step = control_pb2.Piece(data=DONE.SerializeToString(), last=True)
    said = [control_pb2.ScheduleResponse(piece=piece) for piece in (*parts, step)]
    streams, _ = played(Call(*said), Call(said[0]))
    handled: list[control_pb2.ScheduleResponse] = []
    for stream in streams.streams:
        with pytest.raises(EpochEnded) as caught:
            await stream.read_all(handled.append)
        assert caught.value.reason == "BAD_MESSAGE"
    assert handled == [forward]


@pytest.mark.parametrize("member_first", [True, False])
async def test_the_member_without_memory_is_heard_after_another_end_of_the_epoch(member_first: bool) -> None:
    """The other end is a member's, or the coordinator's, which cancels the gateway's task."""

    class Late(Call):
        """It says why it ends once it is left."""

        async def done_writing(self) -> None:
            self.says.put_nowait(fault("OUT_OF_MEMORY"))

    streams, _ = played(Call(*([GOODBYE] if member_first else [])), Late())
    running = asyncio.ensure_future(streams.run(lambda response: None))
    await asyncio.sleep(0)
    if not member_first:
        running.cancel()
    await asyncio.wait((running,))
    assert running.cancelled() is not member_first
    assert streams.out_of_memory


@pytest.mark.parametrize(
    ("silent", "end"), [(True, ("MEMBER_SILENT", control.PONG_SECONDS)), (False, ("RING_STALLED", 110.0))]
)
async def test_members_that_are_silent_and_rings_that_stall_are_found(
    monkeypatch: pytest.MonkeyPatch, silent: bool, end: tuple[str, float]
) -> None:
    """The limits run by the streams' own clock; an answer in between starts them again."""
    monkeypatch.setattr(control, "PING_SECONDS", 0.0)

    class Answering(Call):
        """A second passes with each ping."""

        async def write(self, message: bytes) -> None:
            if self is calls[0]:
                clock.now += 1
            if self is calls[0] or not silent:
                self.says.put_nowait(PONG)

    calls = [Answering(), Answering()]
    streams, clock = played(*calls)
    streams.expect()
    streams.answered()
    streams.expect()
    clock.now += 10
    begun = clock.now
    streams.expect()
    with pytest.raises(EpochEnded) as caught:
        async with asyncio.timeout(200):
            await streams.run(lambda response: None)
    assert (caught.value.reason, isinstance(caught.value, Unheard)) == (end[0], silent)
    assert end[1] < clock.now - begun <= end[1] + 5


async def test_a_record_that_is_lost_ends_the_epoch_and_names_its_sender() -> None:
    streams, clock = played(Call(), Call(), Call())
    sent = control_pb2.Pong(records_sent=7)
    waits = control_pb2.Pong(records_received=6, waiting_ms=3000)
    streams.pong(1, sent)
    streams.pong(2, waits)
    clock.now += 3
    with pytest.raises(EpochEnded) as caught:
        streams.pong(2, waits)
    assert (caught.value.reason, caught.value.metadata["member"]) == ("RECORD_LOST", "m1")


@pytest.mark.parametrize("said", [{"on_battery": True}, {"low_power": True}])
async def test_a_member_that_saves_power_is_known_by_its_newest_pong(said: dict[str, bool]) -> None:
    streams, _ = played(Call(), Call())
    assert not streams.saves_power
    streams.pong(1, control_pb2.Pong(**said))
    streams.pong(0, control_pb2.Pong())
    assert streams.saves_power
    streams.pong(1, control_pb2.Pong())
    assert not streams.saves_power


def look(watch: LossWatch, rank: int, now: float, sent: int = 0, received: int = 0, waiting: float = 0.0):
    return watch.heard(rank, sent=sent, received=received, waiting_seconds=waiting, now=now)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_record_that_was_sent_and_does_not_come_is_lost(size: int, rank: int) -> None:
    """It does not get younger with what is sent after it."""
    watch = LossWatch(size)
    for now, sent, lost in ((0.0, 7, None), (LOST_SECONDS - 0.5, 8, None), (LOST_SECONDS, 9, rank)):
        assert look(watch, rank, now, sent=sent, received=3) is None
        assert look(watch, (rank + 1) % size, now, sent=3, received=6, waiting=now) == lost


@pytest.mark.parametrize(
    ("later", "waiting", "lost"),
    [
        (LOST_SECONDS, LOST_SECONDS, 0),
        (LOST_SECONDS - 0.01, 100.0, None),  # it left a moment ago, and was waited for before
        (100.0, LOST_SECONDS - 0.01, None),  # bytes trickle in, or the receiver computes
    ],
)
def test_a_record_is_lost_that_is_long_on_its_way_and_waited_for(
    later: float, waiting: float, lost: int | None
) -> None:
    watch = LossWatch(2)
    look(watch, 0, 0.0, sent=1)
    assert look(watch, 1, later, waiting=waiting) == lost


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 2.9), st.floats(0.0, 4.0)), min_size=1, max_size=200)
)
def test_a_ring_whose_records_take_less_than_the_limit_loses_none(
    steps: list[tuple[int, float, float]],
) -> None:
    """Records travel one after the other round a ring of three; each takes `way` after `work`."""
    watch, now = LossWatch(3), 0.0
    sent, received, waits_since = [0] * 3, [0] * 3, [0.0] * 3
    rank = 0
    for looks, way, work in steps:
        now += work
        sent[rank] += 1
        left = now
        for part in range(looks + 1):
            at = left + way * part / (looks + 1)
            for one in range(3):
                figures = {"sent": sent[one], "received": received[one], "waiting": at - waits_since[one]}
                assert look(watch, one, at, **figures) is None
        now = left + way
        rank = (rank + 1) % 3
        received[rank] += 1
        waits_since[rank] = now
        assert look(watch, rank, now, sent=sent[rank], received=received[rank]) is None


def test_messages_of_members_are_bounded_before_they_are_parsed() -> None:
    """By their bytes, and by the fields that each cost an object: an empty output has two bytes."""
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


class Pinged(Call):
    """Answers pings and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.pings: asyncio.Queue[control_pb2.Ping] = asyncio.Queue()

    async def write(self, message: bytes) -> None:
        request = control_pb2.ScheduleRequest.FromString(message)
        if request.HasField("ping"):
            self.pings.put_nowait(request.ping)
            self.says.put_nowait(PONG)


@pytest.mark.parametrize("guest", [False, True])
async def test_a_ring_for_which_nobody_waits_is_pinged_seldom_until_somebody_does(
    monkeypatch: pytest.MonkeyPatch, guest: bool
) -> None:
    """A guest is owed nothing by the members, but its clients wait as well."""
    monkeypatch.setattr(control, "REST_SECONDS", 1000.0)
    call, waiting = Pinged(), False
    streams, _ = played(call, busy=lambda: waiting)
    running = asyncio.ensure_future(streams.run(lambda response: None))
    async with asyncio.timeout(200):
        assert (await call.pings.get()).next_ms == 1_000_000
        if guest:
            waiting = True
            streams.stir()
        else:
            streams.expect()
        assert (await call.pings.get()).next_ms == 1000 * control.PING_SECONDS
    running.cancel()
    await asyncio.wait((running,))


async def test_a_member_has_its_whole_time_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first ping of work it was not asked for longer than a silent member is borne."""
    monkeypatch.setattr(control, "REST_SECONDS", 1000.0)
    monkeypatch.setattr(control, "PING_SECONDS", 0.0)
    call = Pinged()
    streams, clock = played(call)
    running = asyncio.ensure_future(streams.run(lambda response: None))
    async with asyncio.timeout(200):
        await call.pings.get()
        clock.now += 1000
        streams.expect()
        for _ in range(10):
            await call.pings.get()
    assert not running.done()
    running.cancel()
    await asyncio.wait((running,))
