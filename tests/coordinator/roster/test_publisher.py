"""Published rosters: one chain, no version with two contents, nothing published that is not stored."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import storekit
from patience import until
from structlog.testing import capture_logs

from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys, extend_root
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import (
    Store,
    StoredDeployment,
    StoredMember,
    StoredRoster,
    revocation_of,
)
from sealring.mesh.crypto import KeyType, SoftwareSigner, member_id
from sealring.mesh.errors import FailedPrecondition, RosterError, Unavailable
from sealring.mesh.pki import Role
from sealring.mesh.roster import Roster, RosterMemory, RosterReader, check_roster, codec
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import admin_pb2, model_pb2

NOW = 1_800_000_000


class Bench:
    """A publisher over a real store, with a clock that the test turns."""

    def __init__(self, folder: Path) -> None:
        self.now = float(NOW)
        self.settings = CoordinatorSettings(state_dir=folder, cluster="demo", software_identity_allowed=True)
        init(self.settings, clock=self.clock)
        self.store = Store.open(folder)
        self.keys = ClusterKeys.load(self.settings, now=NOW)
        self.published: list[StoredRoster] = []
        self.publisher = self.restart()

    def clock(self) -> float:
        return self.now

    def restart(self) -> RosterPublisher:
        publisher = RosterPublisher(self.store, self.keys, self.settings, clock=self.clock)
        publisher.listeners.append(self.published.append)
        return publisher

    def roster(self) -> Roster:
        """The newest, as a reader sees it."""
        return check_roster(self.published[-1].envelope, self.keys.root, now=self.now)

    def enrol(self, **changes: Any) -> StoredMember:
        key = SoftwareSigner.generate().public_key
        member = StoredMember(
            id=member_id(key),
            role=Role.MEMBER,
            name="alpha",
            identity_key=key,
            key_type=KeyType.SOFTWARE,
            enrolled_at=NOW,
            sealing_key=secrets.token_bytes(32),
            level=TrustLevel.SOFTWARE,
            trust=10,
            attestation=b"{}",
            attested_at=NOW,
            challenged_at=NOW,
            manifest_hash=bytes(32),
            addresses=("127.0.0.1:7000",),
        )
        member = storekit.changed(member, **changes)
        with self.publisher.change(grows=True):
            self.store.members.enrol(member)
        return member

    def deploy(self, *members: StoredMember, name: str = "demo", floor: int = 10, created: int = NOW) -> None:
        spec = admin_pb2.DeploymentSpec(
            name=name, model="demo", strategy="pipeline", context=512, trust_floor=floor
        )
        stages = [
            admin_pb2.StagePlan(member=member.id, rank=rank, first_layer=rank, end_layer=rank + 1)
            for rank, member in enumerate(members)
        ]
        plan = admin_pb2.DeploymentPlan(
            spec=spec,
            profile=model_pb2.ModelProfile(layers=len(members), digest="ab" * 32),
            rings=[admin_pb2.RingPlan(ring=f"{name}-0", stages=stages)],
            plan_hash="cd" * 32,
        )
        with self.publisher.change(grows=True):
            self.store.deployments.add(StoredDeployment(name=name, asked=spec, plan=plan, created=created))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "c")
    yield made
    made.store.close()


def serves(bench: Bench, ring: str) -> bool:
    roster = bench.publisher.roster
    return roster is not None and ring in {one.id for one in roster.rings}


def test_there_is_no_roster_before_the_first(bench: Bench) -> None:
    with pytest.raises(FailedPrecondition):
        _ = bench.publisher.current
    assert (bench.publisher.listed("nobody"), serves(bench, "demo-0")) == (None, False)
    first, second = bench.enrol(), bench.enrol(name="beta")
    listed = bench.publisher.listed(second.id)
    assert listed is not None
    assert (listed.id, listed.trust, bench.publisher.listed("nobody")) == (second.id, 10, None)
    assert bench.publisher.listed(first.id) != listed


def test_versions_rise_by_one_in_one_chain_over_restarts(bench: Bench) -> None:
    for restart in (False, True, False, True):
        if restart:
            bench.publisher = bench.restart()
        bench.publisher.publish()
    rosters = [check_roster(one.envelope, bench.keys.root, now=NOW) for one in bench.published]
    assert [roster.version for roster in rosters] == [1, 2, 3, 4]
    assert [roster.previous for roster in rosters[1:]] == [roster.hash for roster in rosters[:-1]]
    assert [one.hash for one in bench.published] == [roster.hash for roster in rosters]


def test_a_roster_is_stored_before_anybody_sees_it(bench: Bench) -> None:
    seen: list[StoredRoster | None] = []
    bench.publisher.listeners.append(lambda roster: seen.append(bench.store.rosters.latest()))
    bench.publisher.publish()
    assert seen == [bench.publisher.current]


def test_a_crash_after_storing_never_reuses_the_version(bench: Bench) -> None:
    def dies(roster: StoredRoster) -> None:
        raise SystemExit

    bench.publisher.listeners.insert(0, dies)
    with pytest.raises(SystemExit):
        bench.publisher.publish()
    assert bench.published == []
    bench.publisher = bench.restart()
    bench.publisher.publish()
    assert bench.roster().version == 2


def test_a_listener_that_fails_does_not_fail_what_was_stored(bench: Bench) -> None:
    def fails(roster: StoredRoster) -> None:
        raise Unavailable("the database cannot be written")

    bench.publisher.listeners.insert(0, fails)
    with bench.publisher.change():
        bench.store.set_meta("x", b"y")
    assert bench.store.get_meta("x") == b"y"
    assert bench.published == [bench.publisher.current], "the others were told"


def test_a_change_that_fails_leaves_neither_trace_nor_version(bench: Bench) -> None:
    bench.publisher.publish()
    with pytest.raises(RuntimeError), bench.publisher.change():
        bench.store.set_meta("x", b"y")
        raise RuntimeError
    assert bench.store.get_meta("x") is None
    assert bench.publisher.current.version == 1
    bench.publisher.publish()
    assert bench.roster().version == 2


def test_members_that_no_reader_would_take_are_never_signed(bench: Bench) -> None:
    first = bench.enrol()
    with pytest.raises(RosterError):
        bench.enrol(sealing_key=first.sealing_key)
    with pytest.raises(RosterError):
        bench.enrol(level=TrustLevel.HARDWARE, trust=30)
    assert bench.store.members.all() == [first]
    assert bench.roster().version == 1


def test_rings_stand_in_the_roster_with_their_trust(bench: Bench) -> None:
    members = [bench.enrol(), bench.enrol()]
    bench.deploy(*members)
    roster = bench.roster()
    ring = roster.ring("demo-0")
    assert [member.layers for member in ring.members] == [(0, 1), (1, 2)]
    assert (ring.deployment, ring.replica, ring.total_layers, ring.min_trust) == ("demo", 0, 2, 10)
    assert (ring.model_digest, ring.plan_hash) == (b"\xab" * 32, b"\xcd" * 32)
    assert roster.min_trust == 10
    assert serves(bench, "demo-0")
    assert not serves(bench, "demo-1")


def test_a_ring_without_a_member_or_below_its_floor_is_left_out(bench: Bench) -> None:
    members = [bench.enrol(), bench.enrol()]
    bench.deploy(*members)
    bench.deploy(bench.enrol(), name="strict", floor=20)
    assert not serves(bench, "strict-0")
    with bench.publisher.change():
        bench.store.members.revoke(revocation_of(members[0], NOW, banned=False))
    assert not serves(bench, "demo-0")
    roster = bench.roster()
    assert roster.rings == ()
    assert members[0].id in {one.id for one in roster.revoked}


def test_a_roster_that_is_full_takes_no_more_rings_and_every_eviction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer members may need fewer bytes: then the newest rings are left out, and come back where there is
    room."""
    members = [bench.enrol() for _ in range(3)]
    monkeypatch.setattr(codec, "size_cap", lambda count: 2048 + 1024 * count)
    names = []
    with pytest.raises(RosterError) as full:
        for number in range(100):
            bench.deploy(members[0], name=f"demo-{number:02}", created=NOW - number)
            names.append(f"demo-{number:02}-0")
    assert full.value.reason == "ROSTER_TOO_LARGE"
    assert f"3 nodes and {len(names) + 1} rings would have" in full.value.message
    assert {ring.id for ring in bench.roster().rings} == set(names)
    with pytest.raises(RosterError):
        bench.enrol(addresses=("127.0.0.1:7000", *(f"{'h' * 240}:{port}" for port in range(1, 8))))
    with capture_logs() as logs, bench.publisher.change():
        bench.store.members.revoke(revocation_of(members[2], NOW, banned=False))
    assert members[2].id in {one.id for one in bench.roster().revoked}
    kept = {ring.id for ring in bench.roster().rings}
    assert kept == set(names[-len(kept) :]), "the oldest deployments"
    left_out = {one["ring"] for one in logs if one["event"] == "ring_left_out"}
    assert left_out == set(names) - kept != set()
    assert all(serves(bench, name) == (name in kept) for name in names)
    with bench.publisher.change():
        bench.store.deployments.remove(names[-1].removesuffix("-0"))
    assert names[-len(kept) - 1] in {ring.id for ring in bench.roster().rings}


def test_a_revocation_is_told_until_every_certificate_has_expired(bench: Bench) -> None:
    member = bench.enrol()
    with bench.publisher.change():
        bench.store.members.revoke(revocation_of(member, NOW, banned=True))
    bench.now += bench.settings.certificate_lifetime
    bench.publisher.publish()
    assert member.id in {one.id for one in bench.roster().revoked}
    bench.now += 120
    bench.publisher.publish()
    assert member.id not in {one.id for one in bench.roster().revoked}
    assert bench.store.members.banned(member.id)


def test_gateways_are_listed_with_their_keys(bench: Bench) -> None:
    gateway = bench.enrol(role=Role.GATEWAY, sealing_key=b"", addresses=())
    roster = bench.roster()
    assert roster.gateway(gateway.id).identity_key == gateway.identity_key
    assert roster.members == ()


async def test_half_of_its_life_renews_it_once(bench: Bench) -> None:
    bench.publisher.publish()
    for ahead, version in ((bench.settings.roster_lifetime / 2 - 1, 1), (1, 2)):
        bench.now += ahead
        assert await renewed(bench) == version


async def renewed(bench: Bench) -> int:
    """The roster's version once the publisher has looked at the clock."""
    renewing = asyncio.create_task(bench.publisher.renew_forever())
    for _ in range(5):
        await asyncio.sleep(0)
    renewing.cancel()
    return bench.publisher.current.version


async def test_a_roster_of_a_clock_that_was_ahead_is_followed_at_once(bench: Bench) -> None:
    """Machines with the right time would refuse it until then, or until half of its life."""
    bench.now += 3600
    bench.publisher.publish()
    for back, version in ((60, 1), (1, 2), (0, 2)):
        bench.now -= back
        assert await renewed(bench) == version
    assert bench.roster().issued == NOW + 3539


@pytest.mark.parametrize("years", [1.0, 4.9, 5.0, 9.9, 11.0])
def test_a_cluster_whose_clocks_were_years_ahead_goes_on_once_they_are_right(
    bench: Bench, years: float
) -> None:
    """Whether its coordinator has extended the root meanwhile, after five years, or not."""
    reader = RosterReader(bench.keys.root, RosterMemory("demo"), clock=bench.clock, boot=lambda: 0.0)
    for bench.now in (NOW, NOW + years * 365 * 86_400, NOW + 100.0):
        extend_root(bench.settings, now=bench.now)
        bench.keys = ClusterKeys.load(bench.settings, now=bench.now)
        bench.publisher = bench.restart()
        bench.publisher.publish()
        reader.update_root(*bench.keys.root.chain[reader.root.version :])
        assert reader.accept(bench.publisher.current.envelope).issued == int(bench.now)
        assert reader.root == bench.keys.root
    assert reader.root.version == (1 if years < 5 else 2)


async def test_a_renewal_that_fails_is_tried_again(bench: Bench) -> None:
    bench.publisher.publish()
    with bench.store.transaction() as connection:
        pass
    connection.execute("PRAGMA query_only = ON")
    bench.now += bench.settings.roster_lifetime / 2
    with capture_logs() as logs:
        renewing = asyncio.create_task(bench.publisher.renew_forever())
        await until(lambda: logs)
        assert logs[0]["event"] == "roster_not_renewed"
        assert bench.publisher.current.version == 1
        connection.execute("PRAGMA query_only = OFF")
        await until(lambda: bench.publisher.current.version == 2)
    renewing.cancel()


def test_a_proof_from_a_time_when_the_clock_was_ahead_spoils_no_roster(bench: Bench) -> None:
    member = bench.enrol(attested_at=NOW + 3600, challenged_at=NOW + 3600)
    shown = bench.roster().member(member.id)
    assert (shown.attested_at, shown.challenged_at) == (NOW, NOW)
