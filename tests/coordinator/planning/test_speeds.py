"""What is remembered of timed steps, and for how many members."""

from __future__ import annotations

import pytest

from sealring.coordinator.planning import speeds as module
from sealring.coordinator.planning.speeds import Rate, Speeds, differ
from sealring.v1.admin_pb2 import StagePlan
from sealring.v1.membership_pb2 import EpochPrepared, RowsTime
from tests.coordinator.conftest import small_profile

PROFILE = small_profile()
SECOND = EpochPrepared(times=[RowsTime(rows=1, microseconds=1_000_000)])


def stage(member: str, layers: int = 4) -> StagePlan:
    return StagePlan(member=member, first_layer=0, end_layer=layers)


def test_a_stage_that_nobody_timed_says_nothing() -> None:
    speeds = Speeds()
    speeds.note(stage("a"), PROFILE, EpochPrepared())
    assert speeds.of("a", PROFILE.digest, "") is None
    speeds.note(stage("a"), PROFILE, SECOND)
    speeds.note(stage("a"), PROFILE, EpochPrepared())
    assert speeds.of("a", PROFILE.digest, "") == Rate(4000.0)
    assert (speeds.of("b", PROFILE.digest, ""), speeds.of("a", "cd" * 32, "")) == (None, None)


def test_a_step_of_more_rows_is_known_by_those_that_were_timed() -> None:
    """Steps with long caches do not count, nor those of more rows than a ring may have."""
    seconds = [(1, 1.0, 0), (2, 1.5, 0), (4, 1.2, 0), (8, 4.0, 0), (8, 9.0, 512), (257, 5.0, 0), (0, 1.0, 0)]
    timed = [
        RowsTime(rows=rows, microseconds=int(1e6 * took), context=behind) for rows, took, behind in seconds
    ]
    speeds = Speeds()
    speeds.note(stage("a"), PROFILE, EpochPrepared(times=timed, metal=True))
    rate = speeds.of("a", PROFILE.digest, "")
    assert rate is not None
    assert (rate.bytes_per_second, rate.metal) == (4000.0, True)
    assert [rate.times(rows) for rows in (1, 2, 4, 6, 8)] == pytest.approx([1, 1.5, 1.2, 2.6, 4])
    speeds.note(stage("a"), PROFILE, SECOND)
    alone = speeds.of("a", PROFILE.digest, "")
    assert alone is not None
    assert alone.times(16) == 16, "where nobody timed more, rows gain nothing"


@pytest.mark.parametrize(("later", "kept"), [(2, 4), (3, 3), (8, 8)])
def test_the_newest_counts_unless_its_stage_is_much_smaller(later: int, kept: int) -> None:
    speeds = Speeds()
    for layers in (4, later):
        speeds.note(stage("a", layers), PROFILE, SECOND)
    assert speeds.of("a", PROFILE.digest, "") == Rate(1000.0 * kept)


@pytest.mark.parametrize(("layers", "known"), [(2, False), (3, True), (4, True)])
def test_a_stage_much_smaller_than_anothers_says_nothing(layers: int, known: bool) -> None:
    speeds = Speeds()
    speeds.note(stage("a", layers), PROFILE, SECOND)
    speeds.note(stage("b", 4), PROFILE, SECOND)
    assert (speeds.of("a", PROFILE.digest, "") is not None) is known


def test_a_member_that_goes_over_to_its_cpu_has_another_rate() -> None:
    """However much smaller its stage is now, and also where the GPU's was the largest of the ring."""
    speeds, gpu = Speeds(), EpochPrepared(times=[RowsTime(rows=1, microseconds=1000)], computes_on="CUDA")
    speeds.note(stage("a", 4), PROFILE, gpu)
    assert speeds.of("a", PROFILE.digest, "CPU") is None
    assert speeds.of("a", PROFILE.digest, "CUDA") == Rate(4e6)
    cpu = EpochPrepared(times=SECOND.times, computes_on="CPU")
    for member in "ab":
        speeds.note(stage(member, 2), PROFILE, cpu)
    assert [speeds.of(member, PROFILE.digest, "CPU") for member in "ab"] == 2 * [Rate(2000.0)]
    assert speeds.of("a", PROFILE.digest, "CUDA") is None


def test_those_that_were_not_heard_of_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 2)
    speeds = Speeds()
    for member in ("a", "b", "a", "c"):
        speeds.note(stage(member), PROFILE, SECOND)
    assert [speeds.of(member, PROFILE.digest, "") is not None for member in "abc"] == [True, False, True]


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
