"""What members send, up to each bound."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import storekit

from sealring.coordinator.services.node_messages import NodeMessages
from sealring.coordinator.store import StoredMember
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import InvalidInput, PermissionDenied, SealringError
from sealring.mesh.pki import Role
from sealring.mesh.trust.attestation import sign_sealing_key
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import MemberMessage

BYTES = 1 << 50


class Part:
    """Records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.calls.append((name, *args, *named.values()))


def messages(*, clock: Any = lambda: 7, **parts: Any) -> NodeMessages:
    names = ("store", "publisher", "sessions", "driver", "questions", "challenges")
    return NodeMessages(*(parts.get(name, Part()) for name in names), "demo", clock=clock)


@pytest.mark.parametrize(
    ("heartbeat", "good"),
    [
        ({"memory_total": BYTES, "memory_usable": BYTES, "memory_used": BYTES}, True),
        ({"memory_total": BYTES + 1}, False),
        ({"memory_usable": BYTES + 1}, False),
        ({"memory_used": BYTES + 1}, False),
        ({"memory_overhead": BYTES + 1}, False),
        ({"longest_chunk": 8192}, True),
        ({"longest_chunk": 8193}, False),
        ({"computes_on": 16 * "x"}, True),
        ({"computes_on": 17 * "x"}, False),
        ({"rings": [membership_pb2.RingHealth()] * 64}, True),
        ({"rings": [membership_pb2.RingHealth()] * 65}, False),
    ],
)
def test_heartbeats_are_bounded(heartbeat: dict[str, Any], good: bool) -> None:
    driver, sessions = Part(), Part()
    made = messages(driver=driver, sessions=sessions)
    session: Any = SimpleNamespace(member="alpha")
    message = MemberMessage(heartbeat=membership_pb2.Heartbeat(**heartbeat))
    if not good:
        with pytest.raises(InvalidInput) as caught:
            made.take(session, message)
        assert caught.value.reason == "BAD_HEARTBEAT"
        assert (driver.calls, sessions.calls) == ([], [])
        return
    assert made.take(session, message) is False
    assert driver.calls == [("beaten", session, message.heartbeat)]
    assert sessions.calls == [("beaten",)]


SIGNER = SoftwareSigner.generate()
SEALING, OTHER = secrets.token_bytes(32), secrets.token_bytes(32)
MEMBER = StoredMember(
    id="alpha",
    role=Role.MEMBER,
    name="node-a",
    identity_key=SIGNER.public_key,
    sealing_key=SEALING,
    addresses=("127.0.0.1:1",),
    software_version="1.0",
)
HELLO: dict[str, Any] = {
    "software_version": "1.0",
    "instance": bytes(16),
    "addresses": ["127.0.0.1:1"],
    "sealing_key": SEALING,
    "roster_version": 5,
}


def say_hello(**changes: Any) -> list[Any]:
    """What a coordinator with roster 5 does with the hello of a known member."""
    done: list[Any] = []

    @contextmanager
    def change(**given: Any) -> Iterator[None]:
        done.append(given)
        yield

    made = messages(
        store=SimpleNamespace(members=SimpleNamespace(get=lambda one: MEMBER, save=done.append)),
        sessions=SimpleNamespace(is_double=lambda member, instance: instance == b"d" * 16),
        publisher=SimpleNamespace(current=SimpleNamespace(version=5), change=change),
    )
    values = HELLO | changes
    values.setdefault("sealing_key_signature", sign_sealing_key(SIGNER, "demo", values["sealing_key"]))
    made.hello("alpha", membership_pb2.Hello(**values))
    return done


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"software_version": ""}, "BAD_HELLO"),
        ({"software_version": "v" * 65}, "BAD_HELLO"),
        ({"instance": bytes(15)}, "BAD_HELLO"),
        ({"instance": bytes(17)}, "BAD_HELLO"),
        ({"instance": b"d" * 16}, "IDENTITY_IN_USE"),
        ({"addresses": []}, "BAD_ADDRESS"),
        ({"sealing_key_signature": b"signed"}, "SEALING_KEY_SIGNATURE"),
        ({"roster_version": 6}, "ROSTER_CLAIMED_NEWER"),
        ({"roster_version": 5 + (1 << 32)}, "ROSTER_CLAIMED_NEWER"),
    ],
)
def test_a_hello_that_cannot_be_changes_nothing(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SealringError) as caught:
        say_hello(**changes)
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
        ({"sealing_key": OTHER}, True, {"sealing_key": OTHER}),
    ],
)
def test_a_hello_is_stored_and_signed_into_a_roster_if_others_need_it(
    changes: dict[str, Any], signed: bool, saved: dict[str, Any]
) -> None:
    stored = [storekit.changed(MEMBER, **saved)] if saved else []
    assert say_hello(**changes) == ([{"grows": True}] if signed else []) + stored


def test_addresses_that_change_while_a_node_stays_are_signed_once_a_minute_at_most() -> None:
    now, done = [1000.0], []

    @contextmanager
    def change(**given: Any) -> Iterator[None]:
        done.append(given)
        yield

    members = {"alpha": MEMBER}
    made = messages(
        store=SimpleNamespace(
            members=SimpleNamespace(find=members.get, save=lambda one: members.update(alpha=one))
        ),
        publisher=SimpleNamespace(change=change),
        clock=lambda: now[0],
    )
    session: Any = SimpleNamespace(member="alpha", heartbeat=True, beat=lambda beat: None)

    def beat(*addresses: str) -> tuple[str, ...]:
        made.take(session, MemberMessage(heartbeat=membership_pb2.Heartbeat(addresses=addresses)))
        return tuple(members["alpha"].addresses)

    assert beat() == beat(*MEMBER.addresses) == tuple(MEMBER.addresses)
    assert done == []
    now[0] += 60
    assert beat("10.0.0.1:7") == ("10.0.0.1:7",)
    assert beat("10.0.0.2:7") == ("10.0.0.1:7",), "too soon"
    now[0] += 60
    assert beat("10.0.0.2:7") == ("10.0.0.2:7",)
    assert done == [{"grows": True}] * 2
    with pytest.raises(InvalidInput) as caught:
        beat("nowhere")
    assert caught.value.reason == "BAD_ADDRESS"


def test_a_roster_of_another_hand_raises_the_alarm_once_and_alarms_are_bounded() -> None:
    audit = Part()
    held = {3: SimpleNamespace(hash=b"three")}
    made = messages(
        publisher=SimpleNamespace(current=SimpleNamespace(version=5)),
        store=SimpleNamespace(audit=audit, rosters=SimpleNamespace(find=held.get)),
    )

    def seen(version: int, digest: bytes = b"") -> None:
        session: Any = SimpleNamespace(member="a")
        made.take(session, MemberMessage(roster_seen={"version": version, "hash": digest}))

    seen(3, b"three")
    seen(4, b"no longer stored")
    assert audit.calls == []
    for version, digest, count in ((3, b"other", 1), (3, b"other", 1), (6, b"", 2), (7, b"", 3)):
        with pytest.raises(PermissionDenied) as caught:
            seen(version, digest)
        assert caught.value.reason == "ROSTER_EQUIVOCATION"
        assert len(audit.calls) == count
    assert audit.calls[0] == ("append", 7, "a", "roster_equivocation", "a", {"version": 3, "newest": 5})
    for version in range(8, 5000):
        with pytest.raises(PermissionDenied):
            seen(version)
    assert len(audit.calls) < 4000
