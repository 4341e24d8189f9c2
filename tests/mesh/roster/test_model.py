from __future__ import annotations

import dataclasses

from sealring.mesh.roster import RingMember, ring_min_trust, term_of
from sealring.mesh.roster.model import cluster_min_trust
from sealring.testing.authority import make_member


def test_the_lowest_trust_of_a_ring_counts_a_member_that_is_not_there_for_nothing() -> None:
    low, high = (dataclasses.replace(make_member(), trust=trust) for trust in (3, 9))
    ring = [RingMember(one.id, rank, (0, 1)) for rank, one in enumerate((high, low))]
    assert ring_min_trust(ring, (low, high)) == 3
    assert ring_min_trust(ring, (high,)) == 0
    assert ring_min_trust((), (high,)) == 0
    assert cluster_min_trust((), (high,)) == 0


def test_terms_are_the_upper_half_of_a_version() -> None:
    assert [term_of(version) for version in (1, (1 << 32) - 1, 1 << 32, 3 << 32)] == [0, 0, 1, 3]
