"""Open streams of members: replaced ones, and those that end with an eviction."""

from __future__ import annotations

import asyncio

import pytest

from sealring.coordinator.store import StoredRoster
from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.crypto import Ed25519Signer, sign_envelope
from sealring.mesh.errors import PermissionDenied, Unavailable
from sealring.mesh.roster import PAYLOAD_TYPE, whole_roster
from sealring.v1.membership_pb2 import CoordinatorMessage, Heartbeat, RingHealth


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def online(self, member: str) -> None:
        self.heard.append(f"online {member}")

    def left(self, member: str, *, gone: bool) -> None:
        self.heard.append(f"{'gone' if gone else 'lost'} {member}")


def session(member: str, instance: bytes = b"one") -> NodeSession:
    return NodeSession(member, instance, clock=lambda: 0.0)


async def test_who_is_thrown_out_ends_alone() -> None:
    sessions, listener = Sessions(), Listener()
    sessions.listeners.append(listener)
    out, stays = session("out"), session("stays")
    sessions.open(out)
    sessions.open(stays)
    loop = asyncio.get_running_loop()
    late = loop.time() + 1000
    async with asyncio.timeout_at(late) as of_another:
        with sessions.arriving("stays", of_another):
            try:
                async with asyncio.timeout_at(late) as own:
                    with sessions.arriving("out", own):
                        sessions.throw_out("out", "evicted", PermissionDenied("evicted"))
                        await asyncio.Event().wait()
            except TimeoutError:
                pass
            assert own.expired()
            assert of_another.when() == late
    assert listener.heard == ["online out", "online stays", "gone out"]
    assert sessions.find("out") is None
    assert sessions.find("stays") is stays
    assert out.outbox.closed
    assert not stays.outbox.closed


async def test_a_newer_stream_takes_the_place_of_an_older_one() -> None:
    sessions, listener = Sessions(), Listener()
    sessions.listeners.append(listener)
    older, newer = session("a"), session("a", b"two")
    sessions.open(older)
    assert not sessions.is_double("a", b"two")
    sessions.open(newer)
    assert older.outbox.closed
    assert sessions.find("a") is newer
    assert sessions.is_double("a", b"one")
    assert not sessions.is_double("a", b"two")
    assert not sessions.is_double("b", b"one")
    sessions.closed(older)
    assert listener.heard == ["online a", "lost a", "online a"]
    newer.said_goodbye = True
    sessions.closed(newer)
    assert listener.heard[-1] == "gone a"
    assert not sessions.is_double("a", b"one")


async def test_why_a_member_was_refused_is_known_for_a_while() -> None:
    now = 0.0
    sessions = Sessions(clock=lambda: now)
    assert sessions.trouble("a") == ""
    sessions.refused("a", "clocks differ")
    assert sessions.trouble("a") == "clocks differ"
    assert sessions.trouble("b") == ""
    now = 1e6
    assert sessions.trouble("a") == ""


async def test_a_ring_whose_steps_did_not_change_is_idle() -> None:
    one = session("a")
    assert one.heartbeat is None
    one.beat(Heartbeat(memory_usable=5, rings=[RingHealth(ring="r", steps=0), RingHealth(ring="s", steps=1)]))
    assert one.heartbeat.memory_usable == 5
    assert one.idle == set()
    one.beat(Heartbeat(rings=[RingHealth(ring="r", steps=0), RingHealth(ring="s", steps=2)]))
    assert one.idle == {"r"}


async def test_who_is_silent_for_so_long_is_ended_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, listener = Sessions(), Listener()
    sessions.listeners.append(listener)
    silent, speaks = session("silent"), session("speaks")
    sessions.open(silent)
    sessions.open(speaks)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if len(slept) == 20:
            raise asyncio.CancelledError
        slept.append(seconds)
        if len(slept) == 7:
            assert sessions.find("silent") is silent
        if len(slept) == 8:
            assert sessions.find("silent") is None
        speaks.seen()

    monkeypatch.setattr("sealring.coordinator.streams.sessions.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await sessions.watch(3.0)
    assert slept == [0.5] * 20
    assert listener.heard[2:] == ["lost silent"]
    assert sessions.find("speaks") is speaks
    with pytest.raises(Unavailable) as caught:
        _ = [message async for message in silent.outbox.messages()]
    assert caught.value.reason == "SILENT"


async def test_some_of_those_that_were_replaced_are_known() -> None:
    sessions = Sessions()
    for number in range(10):
        sessions.open(session("a", bytes([number])))
    assert [sessions.is_double("a", bytes([number])) for number in range(10)] == [False] + [True] * 8 + [
        False
    ]


async def test_trouble_is_known_for_a_minute() -> None:
    now = 0.0
    sessions = Sessions(clock=lambda: now)
    sessions.refused("a", "why")
    now = 59.9
    assert sessions.trouble("a") == "why"
    now = 60.0
    assert sessions.trouble("a") == ""


async def test_a_message_reaches_who_is_online() -> None:
    sessions, one = Sessions(), session("a")
    sessions.open(one)
    message = CoordinatorMessage()
    message.commit.epoch = 3
    sessions.send("a", message)
    sessions.send("b", message)
    one.close("bye")
    told = [each async for each in one.outbox.messages()]
    assert (told[0], told[1].goodbye.reason, len(told)) == (message, "bye", 2)
    async with asyncio.timeout(200):
        await waiting_for_beat(sessions)


async def waiting_for_beat(sessions: Sessions) -> None:
    waiting = asyncio.create_task(sessions.next_beat())
    await asyncio.sleep(0)
    assert not waiting.done()
    sessions.beaten()
    await waiting


async def test_who_was_sent_the_roster_before_is_sent_what_is_new() -> None:
    signers, entries = [Ed25519Signer.generate()], b",".join(b'{"id":"%d"}' % number for number in range(50))
    payloads = [b'{"members":[' + entries + b'],"version":%d}' % version for version in (1, 2, 3)]
    signed = [sign_envelope(PAYLOAD_TYPE, payload, signers) for payload in payloads]
    rosters = [StoredRoster(version=1, hash=bytes(32), envelope=envelope) for envelope in signed]
    sessions, early, late = Sessions(), session("early"), session("late")
    early.send_roster(rosters[0])
    sessions.open(early)
    sessions.roster_published(rosters[1])
    sessions.open(late)  # nothing was sent to it yet
    sessions.roster_published(rosters[2])
    last = session("last")
    last.send_roster(rosters[2])
    whole = []
    for one, expected, differences in ((early, rosters, 2), (late, rosters[2:], 0), (last, rosters[2:], 0)):
        one.close("that is all")
        told = [message async for message in one.outbox.messages() if message.HasField("roster")]
        updates = [message.roster for message in told]
        whole.append(told[0])
        assert sum(update.HasField("difference") for update in updates) == differences
        held = b""
        for update, roster in zip(updates, expected, strict=True):
            held = whole_roster(update, held)
            assert held == roster.envelope
    assert whole[1] is whole[2], "a thousand members that come at once take the memory of one roster"


async def test_a_node_that_rests_may_be_silent_for_longer_until_somebody_looks() -> None:
    """A look is a second, and a node that works is silent after six."""
    sessions, works, rests = Sessions(), session("works"), session("rests")
    for one, pause in ((works, 2000), (rests, 5000)):
        sessions.open(one)
        one.beat(Heartbeat(next_ms=pause))

    def look(times: int) -> list[str]:
        for _ in range(times):
            sessions.look(6.0)
        return [one.member for one in sessions]

    assert look(6) == ["works", "rests"]
    assert look(1) == ["rests"]
    sessions.attend()
    assert look(3) == ["rests"]
    assert look(1) == []
    assert (await anext(rests.outbox.messages())).heard.look_ms > 0


def test_no_node_puts_off_its_silence_without_end() -> None:
    sessions, one = Sessions(), session("sly")
    sessions.open(one)
    one.beat(Heartbeat(next_ms=(1 << 32) - 1))
    for _ in range(100):
        sessions.look(6.0)
    assert list(sessions) == []
