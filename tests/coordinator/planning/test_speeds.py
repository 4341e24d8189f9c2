"""What is remembered of timed steps, and for how many members."""

from __future__ import annotations

import pytest

from sealring.coordinator.planning import speeds as module
from sealring.coordinator.planning.speeds import Rate, Speeds, differ
from sealring.v1.admin_pb2 import StagePlan
from sealring.v1.membership_pb2 import EpochPrepared
from tests.coordinator.conftest import small_profile

PROFILE = small_profile()
SECOND = EpochPrepared(step_us=1_000_000)


def stage(member: str, layers: int = 4) -> StagePlan:
    return StagePlan(member=member, first_layer=0, end_layer=layers)


def test_a_stage_that_nobody_timed_says_nothing() -> None:
    speeds = Speeds()
    speeds.note(stage("a"), PROFILE, EpochPrepared())
    assert speeds.of("a", PROFILE.digest) is None
    speeds.note(stage("a"), PROFILE, SECOND)
    speeds.note(stage("a"), PROFILE, EpochPrepared())
    assert speeds.of("a", PROFILE.digest) == Rate(4000.0)
    assert (speeds.of("b", PROFILE.digest), speeds.of("a", "cd" * 32)) == (None, None)


@pytest.mark.parametrize(
    ("rows", "rows_us", "share"),
    [(2, 1_500_000, 0.5), (256, 1_255_000, 0.001), (257, 1_256_000, 1.0), (1, 2_000_000, 1.0), (2, 0, 1.0)],
)
def test_rows_are_believed_from_two_on(rows: int, rows_us: int, share: float) -> None:
    speeds = Speeds()
    speeds.note(stage("a"), PROFILE, EpochPrepared(step_us=1_000_000, rows=rows, rows_us=rows_us))
    assert speeds.of("a", PROFILE.digest).row_share == pytest.approx(share)


@pytest.mark.parametrize(("later", "kept"), [(2, 4), (3, 3), (8, 8)])
def test_the_newest_counts_unless_its_stage_is_much_smaller(later: int, kept: int) -> None:
    speeds = Speeds()
    for layers in (4, later):
        speeds.note(stage("a", layers), PROFILE, SECOND)
    assert speeds.of("a", PROFILE.digest) == Rate(1000.0 * kept)


@pytest.mark.parametrize(("layers", "known"), [(2, False), (3, True), (4, True)])
def test_a_stage_much_smaller_than_anothers_says_nothing(layers: int, known: bool) -> None:
    speeds = Speeds()
    speeds.note(stage("a", layers), PROFILE, SECOND)
    speeds.note(stage("b", 4), PROFILE, SECOND)
    assert (speeds.of("a", PROFILE.digest) is not None) is known


def test_those_that_were_not_heard_of_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 2)
    speeds = Speeds()
    for member in ("a", "b", "a", "c"):
        speeds.note(stage(member), PROFILE, SECOND)
    assert [speeds.of(member, PROFILE.digest) is not None for member in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 2.0], True),
        ([1.0, 1.9], False),
        ([0.0, 5.0], False),
        ([3, 2, 1], True),
    ],
)
def test_speeds_differ_where_all_are_known_and_one_is_half_anothers(speeds: list[float], told: bool) -> None:
    assert differ(speeds) is told
