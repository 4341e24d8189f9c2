"""A cluster on paper passes the checks of real readers, and changes as a real one does."""

from __future__ import annotations

import pytest

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.errors import InvalidInput, RosterError
from sealring.mesh.pki import decode_chain, verify_root_chain
from sealring.mesh.roster import check_roster
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import ManualClock, PaperCluster

NOW = 1_800_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


def test_a_reader_that_knows_the_root_key_believes_its_roster(clock: ManualClock) -> None:
    levels = {"demo-0": TrustLevel.SOFTWARE, "demo-1": TrustLevel.HARDWARE}
    cluster = PaperCluster(levels, size=3, clock=clock)
    root = verify_root_chain(decode_chain(cluster.root_chain), bytes.fromhex(cluster.pin), now=NOW)
    roster = check_roster(cluster.envelope, root, now=NOW)
    assert roster == cluster.roster
    assert {ring.id: len(ring.members) for ring in roster.rings} == {"demo-0": 3, "demo-1": 3}
    tails = {ring.id: roster.member(ring.members[-1].id).level for ring in roster.rings}
    assert tails == levels
    with pytest.raises(RosterError):
        check_roster(cluster.envelope, PaperCluster(clock=clock).root, now=NOW)


def test_its_keys_are_those_that_the_roster_names(clock: ManualClock) -> None:
    cluster = PaperCluster(clock=clock)
    roster, ring = cluster.roster, cluster.roster.rings[0]
    for place, signer in zip(ring.members, cluster.signers, strict=True):
        assert roster.member(place.id).identity_key == signer.public_key
    assert roster.member(ring.members[0].id).sealing_key == cluster.keys["demo-0"].public_key
    assert [one.identity_key for one in roster.gateways] == [cluster.gateway.public_key]


def test_rosters_follow_each_other_and_end(clock: ManualClock) -> None:
    cluster = PaperCluster(clock=clock)
    first = cluster.roster
    second = cluster.new_head("demo-0", hybrid=True)
    assert (second.version, second.previous) == (2, first.hash)
    head = second.rings[0].members[0].id
    assert first.member(head).sealing_key != second.member(head).sealing_key
    assert second.member(head).sealing_key == cluster.keys["demo-0"].public_key
    clock.advance(600 + SKEW_SECONDS + 1)
    with pytest.raises(RosterError):
        cluster.publish()
    now = int(clock())
    assert cluster.publish(issued=now, expires=now + 600).version == 3


def test_what_is_signed_apart_is_not_published(clock: ManualClock) -> None:
    cluster = PaperCluster(clock=clock)
    assert cluster.verified(version=9).version == 9
    assert cluster.roster.version == 1


def test_a_name_that_no_cluster_can_have_is_refused() -> None:
    with pytest.raises(InvalidInput):
        PaperCluster(name="no name")
