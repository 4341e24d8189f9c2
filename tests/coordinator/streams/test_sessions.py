"""Open streams: which member is there, who takes whose place, who is thrown out."""

from __future__ import annotations

import asyncio

from sealring.coordinator.streams.sessions import NodeSession, Sessions
from sealring.mesh.errors import PermissionDenied
from sealring.v1.membership_pb2 import Heartbeat, RingHealth


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def online(self, member: str) -> None:
        self.heard.append(f"online {member}")

    def lost(self, member: str) -> None:
        self.heard.append(f"lost {member}")

    def offline(self, member: str) -> None:
        self.heard.append(f"offline {member}")


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
    assert listener.heard == ["online out", "online stays", "offline out"]
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
    assert listener.heard[-1] == "offline a"
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
    assert one.memory_usable == 0
    one.beat(Heartbeat(memory_usable=5, rings=[RingHealth(ring="r", steps=0), RingHealth(ring="s", steps=1)]))
    assert (one.memory_usable, one.idle) == (5, set())
    one.beat(Heartbeat(rings=[RingHealth(ring="r", steps=0), RingHealth(ring="s", steps=2)]))
    assert one.idle == {"r"}
