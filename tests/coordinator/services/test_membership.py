"""What members say, up to each bound: by the service's own parts, without a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.services.membership import MembershipService
from sealring.mesh.errors import InvalidInput, PermissionDenied
from sealring.v1 import membership_pb2

BYTES = 1 << 50


class Part:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.told.append((name, *args, *named.values()))


@pytest.mark.parametrize(
    ("heartbeat", "good"),
    [
        ({"memory_total": BYTES, "memory_usable": BYTES, "memory_used": BYTES}, True),
        ({"memory_total": BYTES + 1}, False),
        ({"memory_usable": BYTES + 1}, False),
        ({"memory_used": BYTES + 1}, False),
        ({"memory_overhead": BYTES + 1}, False),
        ({"rings": [membership_pb2.RingHealth()] * 64}, True),
        ({"rings": [membership_pb2.RingHealth()] * 65}, False),
    ],
)
def test_heartbeats_are_bounded_and_the_first_is_looked_at(heartbeat: dict[str, Any], good: bool) -> None:
    rings, sessions = Part(), Part()
    service: Any = SimpleNamespace(_rings=rings, _sessions=sessions)
    session: Any = SimpleNamespace(heartbeat=None)
    session.beat = lambda beat: setattr(session, "heartbeat", beat)
    message = membership_pb2.Heartbeat(**heartbeat)
    if not good:
        with pytest.raises(InvalidInput) as caught:
            MembershipService._heartbeat(service, session, message)
        assert caught.value.reason == "BAD_HEARTBEAT"
        assert (rings.told, sessions.told, session.heartbeat) == ([], [], None)
        return
    for _ in range(2):
        MembershipService._heartbeat(service, session, message)
    assert rings.told == [("beaten", session, message, True), ("beaten", session, message, False)]
    assert sessions.told == [("beaten",)] * 2


def test_each_message_goes_where_it_belongs() -> None:
    parts = {name: Part() for name in ("_rings", "_profiles", "_traces", "_challenges")}
    service: Any = SimpleNamespace(**parts)
    session: Any = SimpleNamespace(member="alpha")
    where = {
        "profile": ("_profiles", "answered", session),
        "progress": ("_rings", "progressed", "alpha"),
        "prepared": ("_rings", "prepared", "alpha"),
        "up": ("_rings", "up", "alpha"),
        "fault": ("_rings", "faulted", "alpha"),
        "challenge_answer": ("_challenges", "answered", "alpha"),
        "trace": ("_traces", "answered", session),
    }
    for kind, (part, method, who) in where.items():
        message = membership_pb2.MemberMessage()
        getattr(message, kind).SetInParent()
        assert MembershipService._take(service, session, message) is False
        assert parts[part].told.pop() == (method, who, getattr(message, kind))
        assert not any(one.told for one in parts.values())
    goodbye = membership_pb2.MemberMessage(goodbye=membership_pb2.Goodbye(reason="off"))
    assert MembershipService._take(service, session, goodbye) is True


def test_a_roster_of_another_hand_raises_the_alarm_once_and_alarms_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sealring.coordinator.services.membership._MAX_ALARMS", 2)
    audit = Part()
    held = {3: SimpleNamespace(hash=b"three")}
    service: Any = SimpleNamespace(
        _publisher=SimpleNamespace(current=SimpleNamespace(version=5)),
        _store=SimpleNamespace(audit=audit, rosters=SimpleNamespace(find=held.get)),
        _alarms=set(),
        _clock=lambda: 7,
    )

    def seen(version: int, digest: bytes) -> None:
        MembershipService._check_seen(service, "a", membership_pb2.RosterSeen(version=version, hash=digest))

    seen(3, b"three")
    seen(4, b"no longer kept")
    seen(5, b"not kept either")
    assert audit.told == []
    for version, digest, count in ((3, b"other", 1), (3, b"other", 1), (6, b"", 2), (7, b"", 2)):
        with pytest.raises(PermissionDenied) as caught:
            seen(version, digest)
        assert caught.value.reason == "ROSTER_EQUIVOCATION"
        assert len(audit.told) == count
    assert audit.told[0] == ("append", 7, "a", "roster_equivocation", "a", {"version": 3, "newest": 5})
