"""What is known of a ring, from what its members say."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler import (
    LOOKUP,
    MAX_SOURCES,
    MemberMemory,
    RingFacts,
    SourceFacts,
    StepCosts,
    Timed,
)
from sealring.gateway.scheduler.facts import MAX_TIMES
from sealring.mesh.ring import MAX_RUNS
from sealring.v1 import control_pb2 as control


def test_the_slowest_stage_counts() -> None:
    fast = [Timed(1, 1, 0.001), Timed(16, 1, 0.004), Timed(1, 32, 0.02), Timed(1, 128, 0.02)]
    slow = [Timed(1, 1, 0.002), Timed(16, 1, 0.003), Timed(1, 32, 0.01), Timed(1, 128, 0.03)]
    costs = StepCosts.of([fast, slow])
    assert (costs.decode(1), costs.decode(16)) == (0.002, 0.004)
    assert (costs.chunk(1), costs.chunk(32), costs.chunk(128)) == (0.002, 0.02, 0.03)
    assert costs.decode(8.5) == pytest.approx(0.003)
    assert costs.decode(31) == pytest.approx(0.006), "on the line through the last two"


def test_a_slow_stage_that_timed_fewer_sizes_stays_slow() -> None:
    fast = [Timed(rows, 1, 0.001) for rows in (1, 2, 64)] + [Timed(1, tokens, 0.002) for tokens in (4, 2048)]
    slow = [Timed(1, 1, 0.1), Timed(2, 1, 0.2), Timed(1, 4, 0.4)]
    costs = StepCosts.of([fast, slow])
    assert [costs.decode(rows) for rows in (1, 2, 64)] == pytest.approx([0.1, 0.2, 6.4])
    assert costs.chunk(2048) == pytest.approx(204.8)
    assert StepCosts.of([fast, []]) == StepCosts.of([fast])


def test_behind_the_last_stair_rows_cost_what_they_did_in_the_mean() -> None:
    """And not what the row costs that begins it."""
    costs = StepCosts(rows=((1, 1.0), (16, 4.0), (32, 4.0), (33, 8.0)))
    assert costs.decode(32.5) == pytest.approx(6)
    assert 8 < costs.decode(64) <= 16


def test_long_caches_cost_what_they_add_to_a_row() -> None:
    short = [Timed(1, 1, 0.01), Timed(8, 1, 0.02), Timed(1, 64, 0.1)]
    costs = StepCosts.of([[*short, Timed(1, 1, 0.011, 1000), Timed(8, 1, 0.036, 1000)]])
    assert costs.decode(8) == pytest.approx(0.02)
    assert costs.decode(8, 1000) == pytest.approx(0.036)
    assert costs.decode(4, 500) == pytest.approx(costs.decode(4) + 0.004)
    faster = StepCosts.of([[*short, Timed(8, 1, 0.01, 1000)]])
    assert faster.decode(8, 1000) == faster.decode(8), "a slow moment"


@given(
    st.lists(
        st.builds(
            Timed, st.integers(0, 99), st.integers(0, 9999), st.floats(), st.sampled_from([0, 0, 9, -1])
        ),
        max_size=9,
    ),
    st.integers(1, 8192),
)
def test_whatever_is_reported_steps_cost_something_and_longer_caches_no_less(
    timed: list[Timed], size: int
) -> None:
    costs = StepCosts.of([timed])
    assert costs.chunk(size) > 0
    assert 0 < costs.decode(size) <= costs.decode(size, 99)


def test_a_step_of_more_rows_may_take_less() -> None:
    costs = StepCosts.of(
        [[Timed(rows, 1, took) for rows, took in ((1, 0.1), (8, 0.25), (16, 0.11))] + [Timed(1, 16, 0.11)]]
    )
    assert (costs.decode(8), costs.decode(16)) == (0.25, 0.11)


def test_a_member_that_tells_of_many_sizes_keeps_no_gateway_busy() -> None:
    costs = StepCosts.of([[Timed(1, size, 0.01) for size in range(1, 100_000)]])
    assert len(costs.tokens) == MAX_TIMES


def test_long_rows_have_the_lanes_of_rows_that_cost_what_they_hold() -> None:
    """A step of short ones takes the same for one as for four; of long ones it reads every cache."""
    flat = StepCosts(rows=((1, 0.1), (16, 0.1)), behind=1e-4)
    ring = ring_of(*[member_with(1)] * 3, rows=16, costs=flat)
    assert len(ring.lanes(4)) < 4
    assert ring.lanes(4, 16_384) == (1, 1, 1, 1)


facts_of = partial(RingFacts.of, epoch=3, max_rows=8, prefill_chunk=64)


def test_members_tell_their_memory_and_the_least_that_their_caches_allow() -> None:
    attached = [
        control.Attached(kv_bytes_per_token=3, kv_bytes_per_row=4, kv_budget=5, prefixes=support)
        for support in (control.PREFIX_SUPPORT_ANY, control.PREFIX_SUPPORT_EXACT)
    ]
    facts = facts_of(attached)
    assert (facts.max_rows, facts.prefill_chunk) == (8, 64)
    assert facts.members == (MemberMemory(3, 4, 5),) * 2
    assert facts.prefixes == control.PREFIX_SUPPORT_EXACT


def test_a_ring_has_the_sources_of_drafts_that_its_members_tell_and_no_more_than_a_few() -> None:
    head = control.DraftFacts(
        source=control.DRAFT_SOURCE_MODEL, microseconds=1000, rows=4, rows_microseconds=2000
    )
    tail = control.DraftFacts(source=control.DRAFT_SOURCE_MTP_HEAD, microseconds=3000, rows=1, ahead=True)
    members = [control.Attached(kv_budget=4096, sources=told) for told in ([head], [], [tail])]
    found = facts_of(members).sources
    assert found[control.DRAFT_SOURCE_MODEL] == SourceFacts(0.001, 4, 0.002)
    assert found[control.DRAFT_SOURCE_MTP_HEAD] == SourceFacts(0.003, 1, ahead=True)
    assert found[LOOKUP] == SourceFacts()
    assert [found[control.DRAFT_SOURCE_MODEL].guessing(rows) for rows in (1, 4)] == [0.001, 0.002]
    many = [control.DraftFacts(source=number, ahead=True) for number in range(10, 1000)]  # type: ignore[arg-type]
    nameless = [control.Attached(kv_budget=4096, sources=[control.DraftFacts(ahead=True)])]
    assert list(facts_of(nameless).sources) == [LOOKUP], "a step with drafts names their source"
    assert len(facts_of([control.Attached(kv_budget=4096, sources=many)]).sources) == 1 + MAX_SOURCES


def test_rows_of_a_lane_have_drafts_together_where_every_member_takes_them_back() -> None:
    """Those that cut their caches take back more runs than others keep states for."""
    cuts, repeats = {"draft_runs": 64}, {"draft_runs": MAX_RUNS, "drafts_together": True}
    states = {"draft_runs": 2}
    for members, together in (([cuts, cuts], True), ([cuts, repeats], True), ([repeats, states], False)):
        facts = facts_of([control.Attached(kv_budget=4096, **one) for one in members])  # type: ignore[arg-type]
        assert facts.drafts_together == together


@pytest.mark.parametrize(
    ("devices", "lanes"),
    [((b"one", b"one"), (8,)), ((b"one", b"other"), (4, 4)), ((b"", b""), (4, 4))],
)
def test_stages_on_one_gpu_have_one_lane_where_rows_cost_nothing(
    devices: tuple[bytes, ...], lanes: tuple[int, ...]
) -> None:
    times = [control.StepTime(rows=rows, tokens=1, microseconds=20_000 + rows) for rows in (1, 8)]
    times.append(control.StepTime(rows=1, tokens=8, microseconds=20_000))
    attached = [control.Attached(kv_budget=1 << 20, times=times, device=device) for device in devices]
    assert facts_of(attached).lanes(8) == lanes


def test_what_every_member_has_kept_goes_on() -> None:
    def attached(*kept: tuple[int, int, int], names: int = 0) -> control.Attached:
        held = [
            control.KeptPrefix(epoch=epoch, row=row, tokens=tokens, names=bytes(16 * names))
            for epoch, row, tokens in kept
        ]
        return control.Attached(epoch=3, kept=held)

    head = attached((1, 1, 128), (1, 2, 128), (2, 1, 64), (3, 9, 128), (2, 5, 128), names=2)
    other = attached((1, 2, 128), (1, 1, 64), (2, 1, 64), (3, 9, 128))
    # the names of (2, 1, 64) are too many, and what is of this epoch is of no earlier one
    assert [origin for origin, _ in facts_of([head, other]).kept] == [(1, 2, 128)]
    assert facts_of([attached((1, 2, 128)), other]).kept == ()


def test_what_cannot_be_cut_goes_on_at_the_marks_that_every_such_member_has() -> None:
    def attached(*marks: int, cuts: bool = False) -> control.Attached:
        kept = control.KeptPrefix(epoch=1, row=1, tokens=256, names=bytes(16 * 4), marks=marks)
        support = control.PREFIX_SUPPORT_ANY if cuts else control.PREFIX_SUPPORT_EXACT
        return control.Attached(epoch=3, kept=[kept], prefixes=support)

    for members, lengths in (
        ([attached(64, 128), attached(128, 192), attached(cuts=True)], [128, 256]),
        ([attached(64), attached(128)], [256]),
        ([attached(cuts=True)], [64, 128, 192, 256]),
    ):
        ((_, names),) = facts_of(members).kept
        assert [length for length, _ in names] == lengths
