"""The events for gateways: the newest of each ring, whatever their number and however slowly they read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.coordinator.store import StoredRoster
from sealring.coordinator.streams.outbox import Outbox
from sealring.coordinator.streams.watchers import Watchers
from sealring.mesh.crypto import Suite
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.mesh.roster import Roster
from sealring.mesh.rpc import own_release
from sealring.mesh.system.networks import hosts_of, own_addresses
from sealring.v1.membership_pb2 import Door, RingGone, RingState, RosterUpdate, WatchResponse

RELEASE = own_release()
HOSTS = ["192.0.2.7", "192.0.2.8", "evil.example"]


def named_in(host: str) -> Roster:
    return Roster(
        "demo", 1, 1, bytes(32), 0, 60, (Suite.X25519_AES256GCM,), 0, 0, coordinators=(f"{host}:7700",)
    )


def ring(name: str, epoch: int) -> WatchResponse:
    return WatchResponse(ring=RingState(ring=name, epoch=epoch))


def roster(envelope: bytes) -> WatchResponse:
    return WatchResponse(roster=RosterUpdate(envelope=envelope))


async def heard(outbox: Outbox[WatchResponse]) -> list[WatchResponse]:
    outbox.close()
    return [event async for event in outbox.messages()]


async def test_a_thousand_rings_are_told_and_each_once() -> None:
    watchers = Watchers()
    outbox = watchers.add("gate", RELEASE)
    for epoch in (1, 2, 3):
        for number in range(1000):
            watchers.tell(ring(f"demo-{number}", epoch))
    assert await heard(outbox) == [ring(f"demo-{number}", 3) for number in range(1000)]


async def test_a_ring_that_is_gone_takes_the_place_of_its_state() -> None:
    watchers = Watchers()
    outbox = watchers.add("gate", RELEASE)
    gone = WatchResponse(gone=RingGone(ring="a-0"))
    for event in (ring("a-0", 1), ring("b-0", 1), gone):
        watchers.tell(event)
    assert await heard(outbox) == [ring("b-0", 1), gone]


async def test_a_roster_comes_with_the_names_of_now() -> None:
    names = {"abcd": "mini"}
    watchers = Watchers(lambda: names)
    outbox = watchers.add("gate", RELEASE)
    names["abcd"] = "attic"
    watchers.roster_published(StoredRoster(envelope=b"first"))
    (told,) = await heard(outbox)
    assert told.roster == RosterUpdate(envelope=b"first", names={"abcd": "attic"})


async def test_a_roster_comes_before_the_rings_of_it() -> None:
    watchers = Watchers()
    outbox = watchers.add("gate", RELEASE)
    for event in (roster(b"one"), ring("a-0", 1), roster(b"two"), ring("b-0", 2)):
        watchers.tell(event)
    assert await heard(outbox) == [roster(b"two"), ring("a-0", 1), ring("b-0", 2)]


async def test_who_has_left_is_told_nothing_more() -> None:
    watchers = Watchers()
    stays, leaves = watchers.add("gate", RELEASE), watchers.add("other", RELEASE)
    assert watchers.watches("other")
    for _ in range(2):
        watchers.remove(leaves)
    assert (watchers.watches("gate"), watchers.watches("other")) == (True, False)
    watchers.tell(ring("a-0", 1))
    assert await heard(leaves) == []
    assert await heard(stays) == [ring("a-0", 1)]


async def test_every_watch_of_who_is_thrown_out_ends_and_no_other() -> None:
    watchers = Watchers()
    first, second, other = (watchers.add(name, RELEASE) for name in ("gate", "gate", "other"))
    watchers.throw_out("gate", Unavailable("evicted", reason="EVICTED"))
    watchers.tell(ring("a-0", 1))
    for outbox in (first, second):
        with pytest.raises(Unavailable):
            await heard(outbox)
    watchers.close_all()
    assert [event async for event in other.messages()] == [ring("a-0", 1)]


async def test_what_keeps_a_gateway_from_its_work_is_known_while_it_lasts() -> None:
    watchers = Watchers()
    first, second = watchers.add("gate", RELEASE), watchers.add("gate", RELEASE)
    watchers.troubled(first, "the disk is full")
    watchers.troubled(second, "")
    assert (watchers.trouble("gate"), watchers.trouble("other")) == ("the disk is full", "")
    watchers.troubled(first, "")
    assert watchers.trouble("gate") == ""
    watchers.troubled(second, "again")
    watchers.remove(second)
    assert watchers.trouble("gate") == ""


def test_what_a_gateway_speaks_is_known_while_it_watches() -> None:
    watchers = Watchers()
    first, second = watchers.add("gate", RELEASE), watchers.add("gate", RELEASE)
    watchers.remove(first)
    assert watchers.releases == {"gate": RELEASE}
    watchers.remove(second)
    assert not watchers.releases


def test_a_gateway_without_a_rings_protocol_is_told_of() -> None:
    watchers = Watchers()
    watchers.add("gate", RELEASE)
    for protocol, said in (
        (RELEASE.protocol, ""),
        (
            RELEASE.protocol + 1,
            f"it does not speak protocol {RELEASE.protocol + 1} of ring a-0: update the older of the two",
        ),
    ):
        watchers.tell(WatchResponse(ring=RingState(ring="a-0", protocol=protocol)))
        assert watchers.trouble("gate") == said
    assert watchers.trouble("other") == ""
    watchers.tell(WatchResponse(gone=RingGone(ring="a-0")))
    assert watchers.trouble("gate") == ""


@given(st.lists(st.sampled_from(HOSTS), max_size=4), st.sampled_from(["127.0.0.1", *HOSTS]))
def test_a_gateway_names_addresses_of_its_own_machine_or_of_the_rosters(said: list[str], peer: str) -> None:
    """And so sends the programs of members to no other. A gateway that calls over loopback is on the
    coordinator's machine, all of whose addresses are its own."""
    own = {one.host for one in own_addresses()}
    watchers, roster = Watchers(), named_in(HOSTS[0])
    outbox = watchers.add("gate", RELEASE, hosts_of(peer))
    watchers.opened(outbox, Door(addresses=[f"{host}:7781" for host in [*said, *list(own)[:1]][:4]]))
    named = watchers.addresses("gate", roster)
    assert {one.rpartition(":")[0] for one in named} <= {HOSTS[0], peer} | own
    assert all(f"{host}:7781" in named for host in said if host in (HOSTS[0], peer))
    beside = peer == "127.0.0.1" or peer in own
    assert (not own or len(said) == 4) or beside == (f"{next(iter(own))}:7781" in named)
    assert watchers.addresses("other", roster) == []
    watchers.remove(outbox)
    assert watchers.addresses("gate", None) == []


def test_where_a_lan_door_is_open_is_bounded_and_goes_with_its_gateways_watch() -> None:
    watchers = Watchers()
    outbox = watchers.add("gate", RELEASE, frozenset())
    watchers.opened(outbox, Door(lan=["attic.local:8443", "10.0.0.1:8443"]))
    assert watchers.lan("gate") == ["attic.local:8443", "10.0.0.1:8443"]
    for bad in (["10.0.0.1:1"] * 5, ["nowhere"], ["10.0.0.1:99999"]):
        for field in ("addresses", "lan"):
            with pytest.raises(InvalidInput):
                watchers.opened(outbox, Door(**{field: bad}))
    watchers.remove(outbox)
    assert watchers.lan("gate") == []
