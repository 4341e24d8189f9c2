"""What members say, up to each bound: by the service's own parts, without a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.services.membership import MembershipService
from sealring.coordinator.store import StoredMember
from sealring.mesh.crypto.key_type import KeyType
from sealring.mesh.errors import InvalidInput, PermissionDenied, SealringError
from sealring.mesh.pki.certificates import Role
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
    names = ("_rings", "_profiles", "_traces", "_challenges", "_diagnoses", "_models")
    parts = {name: Part() for name in names}
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
        "diagnosis": ("_diagnoses", "answered", session),
        "model_changed": ("_models", "answered", session),
    }
    for kind, (part, method, who) in where.items():
        message = membership_pb2.MemberMessage()
        getattr(message, kind).SetInParent()
        assert MembershipService._take(service, session, message) is False
        assert parts[part].told.pop() == (method, who, getattr(message, kind))
        assert not any(one.told for one in parts.values())
    goodbye = membership_pb2.MemberMessage(goodbye=membership_pb2.Goodbye(reason="off"))
    assert MembershipService._take(service, session, goodbye) is True
    for unknown in (membership_pb2.MemberMessage(), membership_pb2.MemberMessage(hello={})):
        with pytest.raises(InvalidInput) as caught:
            MembershipService._take(service, session, unknown)
        assert caught.value.reason == "BAD_MESSAGE"
    for kind, method in (("heartbeat", "_heartbeat"), ("roster_seen", "_check_seen")):
        told: list[Any] = []
        setattr(service, method, lambda *said, told=told: told.append(said))
        message = membership_pb2.MemberMessage()
        getattr(message, kind).SetInParent()
        assert MembershipService._take(service, session, message) is False
        who = session if kind == "heartbeat" else "alpha"
        assert told == [(who, getattr(message, kind))]


def test_a_stream_that_ends_is_over_for_all_who_asked_over_it() -> None:
    parts = {name: Part() for name in ("_profiles", "_traces", "_diagnoses", "_models", "_sessions")}
    service: Any = SimpleNamespace(**parts)
    MembershipService._ended(service, "session")  # type: ignore[arg-type]
    told = {name: part.told for name, part in parts.items()}
    assert told.pop("_sessions") == [("closed", "session")]
    assert list(told.values()) == [[("gone", "session")]] * 4


@pytest.mark.parametrize("what", ["message", "goodbye", "renewal", "refused"])
def test_whatever_a_node_says_it_is_there(what: str) -> None:
    def take(session: Any, message: Any) -> bool:
        if what == "refused":
            raise InvalidInput("no", reason="BAD_HEARTBEAT")
        return what == "goodbye"

    session, tenure = Part(), Part()
    session.outbox, session.said_goodbye = Part(), False  # type: ignore[attr-defined]
    service: Any = SimpleNamespace(_take=take)
    message = membership_pb2.MemberMessage()
    if what == "renewal":
        message.renewal.SetInParent()
    MembershipService._listen(service, session, tenure, message)  # type: ignore[arg-type]
    assert session.told[0] == ("seen",)
    assert [one[:2] for one in session.told[1:]] == [("close", "BAD_HEARTBEAT")] * (what == "refused")
    assert tenure.told == ([("renew", message.renewal)] if what == "renewal" else [])
    assert session.outbox.told == [("close",)] * (what == "goodbye")  # type: ignore[attr-defined]
    assert session.said_goodbye is (what == "goodbye")  # type: ignore[attr-defined]


MEMBER = StoredMember(
    *("alpha", Role.MEMBER, "node-a", b"key", KeyType.SOFTWARE, 1),
    sealing_key=b"seal",
    addresses=("127.0.0.1:1",),
    software_version="1.0",
)
HELLO: dict[str, Any] = {
    "software_version": "1.0",
    "instance": bytes(16),
    "addresses": ["127.0.0.1:1"],
    "sealing_key": b"seal",
    "sealing_key_signature": b"signed",
    "roster_version": 5,
}


class Hello:
    """What is done with one, of a member of which this is known, by a coordinator with roster 5."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.done: list[Any] = []
        self.verified: list[Any] = []
        known = SimpleNamespace(get=lambda one: MEMBER, save=lambda one: self.done.append(one))
        service: Any = SimpleNamespace(
            _store=SimpleNamespace(members=known),
            _sessions=SimpleNamespace(is_double=lambda member, instance: instance == b"d" * 16),
            _publisher=SimpleNamespace(current=SimpleNamespace(version=5), change=self._change),
            _cluster="demo",
        )
        target = "sealring.coordinator.services.membership.verify_sealing_key"
        monkeypatch.setattr(target, lambda *given: self.verified.append(given))
        MembershipService._take_hello(service, "alpha", membership_pb2.Hello(**(HELLO | changes)))

    @contextmanager
    def _change(self, **given: Any) -> Iterator[None]:
        self.done.append(given)
        yield


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"software_version": ""}, "BAD_HELLO"),
        ({"software_version": "v" * 65}, "BAD_HELLO"),
        ({"instance": bytes(15)}, "BAD_HELLO"),
        ({"instance": bytes(17)}, "BAD_HELLO"),
        ({"instance": b"d" * 16}, "IDENTITY_IN_USE"),
        ({"addresses": []}, "BAD_ADDRESS"),
        ({"roster_version": 6}, "ROSTER_CLAIMED_NEWER"),
        ({"roster_version": 5 + (1 << 32)}, "ROSTER_CLAIMED_NEWER"),
    ],
)
def test_a_hello_that_cannot_be_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SealringError) as caught:
        Hello(monkeypatch, **changes)
    assert caught.value.reason == reason
    if reason == "ROSTER_CLAIMED_NEWER":
        assert ("standby has taken over" in caught.value.message) == (changes["roster_version"] > 6)


@pytest.mark.parametrize(
    ("changes", "signed", "saved"),
    [
        ({}, False, {}),
        ({"software_version": "v"}, False, {"software_version": "v"}),
        ({"software_version": "v" * 64}, False, {"software_version": "v" * 64}),
        ({"addresses": ["127.0.0.1:2"]}, True, {"addresses": ("127.0.0.1:2",)}),
        ({"sealing_key": b"new"}, True, {"sealing_key": b"new"}),
    ],
)
def test_what_a_node_says_of_itself_is_kept_and_signed_where_others_need_it(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], signed: bool, saved: dict[str, Any]
) -> None:
    made = Hello(monkeypatch, **changes)
    kept = [dataclasses.replace(MEMBER, **saved)] if saved else []
    assert made.done == ([{"grows": True}] if signed else []) + kept
    assert made.verified == [(b"key", "demo", changes.get("sealing_key", b"seal"), b"signed")]


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
