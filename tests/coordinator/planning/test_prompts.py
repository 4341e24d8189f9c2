"""Cuts for prompts: as fast as any that may be, only where they pay, and never instead of context."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.links import Link, Network
from sealring.coordinator.planning.planner import end_held, plan
from sealring.coordinator.planning.prompts import PAYS, prompt_cut
from sealring.coordinator.planning.specs import check_spec
from sealring.coordinator.planning.speeds import Rate, Speeds
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import InvalidInput, ResourceExhausted
from sealring.v1 import admin_pb2, model_pb2
from sealring.v1.admin_pb2 import StagePlan
from sealring.v1.membership_pb2 import EpochPrepared, RowsTime
from tests.coordinator.conftest import small_profile

MIB = 1 << 20
ROUNDING = 1e-6
HANDOFF = 2


def machine(name: str, prefill: float, memory: int = 8000 * MIB, decode: float = 100.0) -> Candidate:
    return Candidate(
        encode_base32(name.rjust(32).encode()), name, memory, 10, rate=Rate(decode, prefill=prefill)
    )


def demand(weights: list[int], row: int = 1) -> Demand:
    count = len(weights)
    return Demand(
        tuple(weights), (row,) * count, 0, 0, tied=False, handoff=HANDOFF, travelling=tuple(weights)
    )


def seconds(
    weights: list[int], speeds: list[float], ends: tuple[int, ...], answers: list[int], link: float = 1e9
) -> float:
    """A token takes them in the slowest stage, or over the slowest link. A doubled layer sends as many bytes
    as it weighs."""
    computed = (
        sum(weights[first:end]) / speed for first, end, speed in zip((0, *ends), ends, speeds, strict=False)
    )
    sent = (
        (HANDOFF + sum(weights[own:end])) / link for own, end in zip(answers[:-1], ends[:-1], strict=True)
    )
    return max(*computed, *sent)


RINGS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(0, 40)), min_size=2, max_size=3)


@given(RINGS, st.sampled_from([1e9, 3.0, 1.0]), st.data())
def test_no_cut_that_two_members_may_hold_is_faster(
    ring: list[tuple[int, int, int]], link: float, data: Any
) -> None:
    """By trying every one. A member has memory for its own layers, and for some units more."""
    layers = [count for count, _, _ in ring]
    speeds = [float(speed) for _, speed, _ in ring]
    weights = data.draw(st.lists(st.integers(1, 5), min_size=sum(layers), max_size=sum(layers)))
    answers = list(itertools.accumulate(layers))
    members = []
    for end, (count, speed, spare) in zip(answers, ring, strict=True):
        need = sum(weights[end - count : end]) + count + spare
        members.append(machine(f"m{end}", speed, need))
    members = [dataclasses.replace(one, memory_usable=-(-one.memory_usable * 10 // 9) + 1) for one in members]
    network = Network(Link(1e-4, link))
    planned = list(zip(members, layers, strict=True))
    made = prompt_cut(demand(weights), planned, network, 1, asked=True, ordered=True)

    def allowed(ends: tuple[int, ...]) -> bool:
        prompts = [end - first for first, end in itertools.pairwise((0, *ends))]
        try:
            check_spec(spec(split=layers, prompt_split=prompts))
        except InvalidInput:
            return False
        return all(
            sum(weights[first:end]) + end - first <= member.room
            for first, end, member in zip((0, *answers), ends, members, strict=False)
        )

    before = seconds(weights, speeds, tuple(answers), answers, link)
    every = ((*ends, answers[-1]) for ends in itertools.combinations(range(1, answers[-1]), len(layers) - 1))
    fastest = min(seconds(weights, speeds, ends, answers, link) for ends in every if allowed(ends))
    if made is None:
        assert before / fastest <= PAYS + ROUNDING
        return
    ends = tuple(end + more for end, more in zip(answers, made.doubled, strict=True))
    assert allowed(ends)
    assert seconds(weights, speeds, ends, answers, link) == pytest.approx(fastest)
    assert made.gain == pytest.approx(before / fastest)
    assert made.gain >= PAYS


def test_an_order_with_one_cut_takes_no_place_of_one_with_two() -> None:
    """With the faster member first prompts gain more, and nobody has memory for layers to be held twice."""
    ring = [(machine("slow", 5, 11), 2), (machine("swift", 7, 26), 4)]
    assert [member.room for member, _ in ring] == [10, 24]
    made = prompt_cut(demand([1, 1, 3, 3, 3, 3]), ring, Network(), 1, asked=True, ordered=False)
    assert made is not None
    assert (made.ring, made.doubled) == (ring, (1, 0))


def spec(**changes: object) -> admin_pb2.DeploymentSpec:
    return admin_pb2.DeploymentSpec(**({"name": "demo", "model": "demo"} | changes))  # type: ignore[arg-type]


def profile(**changes: object) -> model_pb2.ModelProfile:
    count = 11
    values: dict[str, object] = {
        "layers": count,
        "layer_bytes": [400 * MIB] * count,
        "kv_bytes_per_token": [1024] * count,
        "kv_max_tokens": [0] * count,
        "state_bytes": [0] * count,
        "travels": True,
    }
    made = small_profile()
    for name in values:
        made.ClearField(name)  # type: ignore[arg-type]
    made.MergeFrom(model_pb2.ModelProfile(**(values | changes)))  # type: ignore[arg-type]
    return made


SLOW, FAST = machine("slow", 267), machine("swift", 738)
"""As an M3 Ultra and an M5 Max prefill."""


def prompts(made: admin_pb2.DeploymentPlan) -> list[tuple[str, int, int]]:
    return [
        (
            stage.member_name,
            stage.end_layer - stage.first_layer,
            stage.prompt_end_layer - stage.prompt_first_layer,
        )
        for ring in made.rings
        for stage in ring.stages
    ]


def test_the_member_that_prefills_faster_comes_first_and_the_plan_says_why() -> None:
    made = plan(spec(stages=2), profile(), [SLOW, FAST])
    assert prompts(made) == [("swift", 6, 8), ("slow", 5, 3)]
    (why,) = [line for line in made.reasons if "prompts are computed" in line]
    assert "with 8,3 layers, 2.0 times as fast" in why
    assert "prefill 2.8 times as fast as slow" in why
    assert "800" in why, "MiB that are held twice"


@pytest.mark.parametrize(
    ("asked", "changed", "members"),
    [
        ({"prompt_split": [0]}, {}, [SLOW, FAST]),
        ({"split": [6, 5]}, {}, [FAST, SLOW]),
        ({}, {"travels": False}, [SLOW, FAST]),
        ({}, {}, [SLOW, dataclasses.replace(FAST, rate=Rate(100))]),
        ({}, {}, [SLOW, machine("alike", 300)]),
        ({"members": [SLOW.id, FAST.id]}, {}, [SLOW, FAST]),
    ],
)
def test_prompts_have_no_cut_of_their_own(
    asked: dict[str, Any], changed: dict[str, Any], members: list[Candidate]
) -> None:
    """The operator gave one or an order, speeds are not known or alike, or caches do not travel."""
    given = asked if "split" in asked else {"stages": 2} | asked
    made = plan(spec(**given), profile(**changed), members)
    assert {prompt for _, _, prompt in prompts(made)} == {0}


def test_links_decide_before_speed() -> None:
    members = [SLOW, FAST, machine("third", 267)]
    near = Link(1e-4, 5e9)
    links = {frozenset((one.id, other.id)): near for one, other in [(SLOW, FAST), (members[2], SLOW)]}
    made = plan(spec(stages=3), profile(), members, Network(Link(0.05, 1e7), links))
    assert [name for name, _, _ in prompts(made)][1] == "slow"


@given(
    st.sampled_from([0, 1, 2, 4, 64]),
    st.tuples(st.integers(2000, 8000), st.integers(2000, 8000)),
    st.sampled_from([0, 20 * MIB]),
    st.booleans(),
    st.sampled_from([0, 600 * MIB]),
)
@example(0, (4400, 4400), 20 * MIB, True, 0)
@example(64, (4637, 4734), 0, False, 1200 * MIB)
def test_context_and_rows_that_were_asked_for_stay(
    rows: int, memory: tuple[int, int], state: int, speculate: bool, head: int
) -> None:
    """Half of those that were not do. Memory that takes drafts back stays too."""
    both = zip((SLOW, FAST), memory, strict=True)
    members = [dataclasses.replace(one, memory_usable=size * MIB) for one, size in both]
    asked = spec(stages=2, max_rows=rows, context=8192, speculate=speculate)
    given = profile(max_context=65536, state_bytes=[state] * 11, trimmable=True, head_bytes=head)
    try:
        one = plan(admin_pb2.DeploymentSpec(prompt_split=[0], **_fields(asked)), given, members)
    except ResourceExhausted:
        return
    two = plan(asked, given, members)
    assert one.spec.context == two.spec.context == 8192
    assert two.spec.max_rows >= (rows or one.spec.max_rows // 2)
    least = min(rows, _held(one, given)) if rows else one.spec.max_rows // 2
    assert _held(two, given) >= least


@given(
    st.tuples(st.integers(2000, 8000), st.integers(2000, 8000), st.integers(2000, 8000)),
    st.sampled_from([267.0, 400.0, 738.0]),
    st.integers(0, 1),
)
def test_a_ring_that_loses_a_member_keeps_its_promises_with_one_cut_or_two(
    memory: tuple[int, int, int], speed: float, lost: int
) -> None:
    """It is planned anew over the others, with the context and the rows that clients were promised."""
    each = zip((SLOW, FAST, machine("third", speed)), memory, strict=True)
    members = [dataclasses.replace(one, memory_usable=size * MIB) for one, size in each]
    given = profile(max_context=65536)
    try:
        before = plan(spec(stages=2), given, members[:2])
        asked = spec(stages=2, context=before.spec.context, max_rows=before.spec.max_rows)
        left = [members[1 - lost], members[2]]
        one = plan(admin_pb2.DeploymentSpec(prompt_split=[0], **_fields(asked)), given, left)
    except ResourceExhausted:
        return
    now = plan(asked, given, left)
    assert {stage.member for stage in now.rings[0].stages} == {member.id for member in left}
    assert (now.spec.context, now.spec.max_rows) == (before.spec.context, before.spec.max_rows)
    assert _held(now, given) >= min(before.spec.max_rows, _held(one, given))
    doubled = any(end for _, _, end in prompts(now))
    rates = {member.rate.prefill for member in left if member.rate}
    layers = {stage.end_layer - stage.first_layer for stage in one.rings[0].stages}
    assert not (doubled and len(rates) == len(layers) == 1)


def _held(made: admin_pb2.DeploymentPlan, given: model_pb2.ModelProfile) -> int:
    """Rows of the whole context for which every member has memory."""
    sizes = made.spec.context, 0, made.spec.prefill_chunk, 0, made.spec.max_rows
    needs = Demand.of(given, *sizes, speculate=made.spec.speculate)
    return min(
        (stage.kv_budget - needs.draft_bytes(stage.first_layer, end_held(stage))) // stage.kv_bytes
        for ring in made.rings
        for stage in ring.stages
    )


@pytest.mark.parametrize(("speed", "gains"), [(125e6, True), (12.5e6, False)])
def test_links_have_to_carry_the_caches_of_doubled_layers(speed: float, gains: bool) -> None:
    """400 KB a token for each of them: 31 tokens a second over 100 Mbit/s, 312 over 1 Gbit/s."""
    given = profile(kv_bytes_per_token=[400_000] * 11)
    members = [dataclasses.replace(one, rate=Rate(100, prefill=speed)) for one, speed in FEW]
    made = plan(spec(stages=2, context=512), given, members, Network(Link(1e-4, speed)))
    assert any(prompt for _, _, prompt in prompts(made)) == gains


FEW = [(SLOW, 40.0 * 400 * MIB * 5), (FAST, 120.0 * 400 * MIB * 5)]
"""So fast that a stage of five layers takes 40 and 120 tokens a second."""


def _fields(given: admin_pb2.DeploymentSpec) -> dict[str, Any]:
    return {field.name: value for field, value in given.ListFields()}


def test_a_prefill_speed_is_that_of_the_layers_that_compute_prompts() -> None:
    speeds, timed = Speeds(), [RowsTime(rows=1, microseconds=1000)]
    cut = StagePlan(member="a", first_layer=0, end_layer=4, prompt_first_layer=0, prompt_end_layer=6)
    for stage, layers in ((StagePlan(member="a", end_layer=4), 4), (cut, 6)):
        speeds.note(stage, small_profile(), EpochPrepared(times=timed, chunk_tokens=512, chunk_us=2_000_000))
        rate = speeds.of("a", small_profile().digest, "")
        assert rate is not None
        assert rate.prefill == 512 * layers * 1000 / 2
    for tokens, took in ((0, 1), (1, 1), (1 << 31, 1), (512, 0)):
        speeds.note(cut, small_profile(), EpochPrepared(times=timed, chunk_tokens=tokens, chunk_us=took))
        rate = speeds.of("a", small_profile().digest, "")
        assert rate is not None
        assert rate.prefill == 0
