"""Rosters as differences: what is put together is what was signed, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from rosterkit import NOW

from sealring.mesh.crypto import parse_envelope, sign_envelope
from sealring.mesh.errors import RosterError
from sealring.mesh.roster import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, check_roster, roster_update, whole_roster
from sealring.testing.authority import make_member
from sealring.v1.membership_pb2 import RosterDifference, RosterUpdate, Splice

POOL = [make_member() for _ in range(12)]
SHARED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

members = st.lists(
    st.tuples(st.sampled_from(range(12)), st.integers(0, 20)), unique_by=lambda pair: pair[0], max_size=12
)


def signed(cluster: Any, chosen: list[tuple[int, int]], version: int) -> bytes:
    found = (dataclasses.replace(POOL[index], challenged_at=NOW - age) for index, age in chosen)
    return bytes(cluster.sign(members=(*cluster.draft.members, *found), version=version))


@SHARED
@given(before=members, after=members)
def test_what_is_put_together_is_what_was_signed(
    cluster: Any, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    old, new = signed(cluster, before, 1), signed(cluster, after, 9)
    assert whole_roster(roster_update(new, old), old) == new
    assert whole_roster(roster_update(new)) == new


def test_a_member_that_changed_does_not_cost_the_others(make_cluster: Callable[..., Any]) -> None:
    cluster = make_cluster(50)
    first = cluster.sign()
    younger = [dataclasses.replace(one, challenged_at=NOW - 1) for one in cluster.draft.members]
    challenged = cluster.sign(members=tuple(younger), version=2)
    assert roster_update(challenged, first).ByteSize() < 50 * 24 + 500
    ordered = sorted(cluster.draft.members, key=lambda one: one.id)
    for gone, most in ((0, 500), (25, 500), (49, 900)):  # what follows the last one stands in its piece
        without = cluster.sign(members=(*ordered[:gone], *ordered[gone + 1 :]), rings=(), version=2)
        assert roster_update(without, first).ByteSize() < most < len(first) // 40


def test_a_difference_of_something_else_is_refused(cluster: Any) -> None:
    first, second, third = (cluster.sign(version=version) for version in (1, 2, 3))
    for before in ((), (b"",), (second,)):
        with refused("ROSTER_DIFFERENCE", RosterError):
            whole_roster(roster_update(third, first), *before)


def test_a_difference_that_was_tampered_with_is_not_believed(cluster: Any) -> None:
    first, second = cluster.sign(version=1), cluster.sign(version=2)
    update = roster_update(second, first)
    (splice,) = (one for one in update.difference.splices if one.added == b"2")
    splice.added = b"3"
    with refused("BAD_SIGNATURE", RosterError):
        check_roster(whole_roster(update, first), cluster.authority.root, now=NOW)


@pytest.mark.parametrize(
    ("splices", "reason"),
    [
        ([Splice(kept=1 << 31)], "ROSTER_DIFFERENCE"),
        ([Splice(kept=1, dropped=1 << 31)], "ROSTER_DIFFERENCE"),
        ([Splice(added=bytes(MAX_PAYLOAD_BYTES))], "ROSTER_TOO_LARGE"),
    ],
)
def test_differences_are_bounded(cluster: Any, splices: list[Splice], reason: str) -> None:
    first = cluster.sign()
    base = roster_update(cluster.sign(version=2), first).difference.base
    update = RosterUpdate(difference=RosterDifference(base=base, splices=splices))
    with refused(reason, RosterError):
        whole_roster(update, first)


@pytest.mark.parametrize(
    ("splices", "whole"),
    [
        ([Splice(kept=3)], b"abc"),
        ([Splice(kept=1, dropped=2, added=b"x")], b"ax"),
        ([Splice(kept=3, added=bytes(MAX_PAYLOAD_BYTES - 3))], b"abc".ljust(MAX_PAYLOAD_BYTES, b"\0")),
        ([Splice(added=b"x"), Splice(kept=1, added=bytes(MAX_PAYLOAD_BYTES - 3))], None),
    ],
)
def test_a_difference_may_reach_to_the_end_of_its_base_and_make_the_largest_roster(
    authority: Any, splices: list[Splice], whole: bytes | None
) -> None:
    base, other = (sign_envelope(PAYLOAD_TYPE, one, authority.roster_signers) for one in (b"abc", b"abd"))
    difference = roster_update(other, base).difference
    del difference.splices[:]
    difference.splices.extend(splices)
    if whole is None:
        with refused("ROSTER_TOO_LARGE", RosterError):
            whole_roster(RosterUpdate(difference=difference), base)
        return
    made = whole_roster(RosterUpdate(difference=difference), base)
    assert parse_envelope(made, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES).payload == whole
