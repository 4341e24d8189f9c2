"""One ring as gateways, operators and its members see it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import READINGS, RunningRing, StepTimes
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import RingHealth


def ring(**changes: Any) -> RunningRing:
    stages = [
        admin_pb2.StagePlan(member=member, member_name=f"node-{member}", rank=rank, kv_budget=10 * rank)
        for member, rank in (("b", 1), ("a", 0))
    ]
    machine: Any = SimpleNamespace(
        epoch=changes.get("epoch", 0), phase=Phase.SERVING, reason="", links=[], progress={}
    )
    spec = admin_pb2.DeploymentSpec(
        name="demo", model="m", context=64, max_rows=3, prefill_chunk=7, kv_bits=8, backend="ring"
    )
    plan = admin_pb2.RingPlan(ring="r", stages=stages, pipeline=changes.get("pipeline", False))
    return RunningRing(plan, admin_pb2.DeploymentPlan(spec=spec), machine, 61)


@pytest.mark.parametrize(
    ("member", "drafted", "accepted", "epoch", "told"),
    [
        ("a", 9, 5, 4, (9, 5)),
        ("a", 9, 9, 4, (9, 9)),
        ("a", 9, 10, 4, (0, 0)),
        ("b", 9, 5, 4, (0, 0)),
        ("a", 9, 5, 3, (0, 0)),
    ],
)
def test_the_head_says_how_many_guesses_of_this_epoch_were_right(
    member: str, drafted: int, accepted: int, epoch: int, told: tuple[int, int]
) -> None:
    made = ring(epoch=4)
    made.beaten(member, RingHealth(epoch=epoch, drafted=drafted, accepted=accepted), 7.0, timed=True)
    assert (made.status().drafted, made.status().accepted) == told


USUAL = {"a": 900, "b": 2000, "c": 1400}


def beat(times: StepTimes, count: int, *, load: float = 1.0, **slower: float) -> None:
    for _ in range(count):
        for member, took in USUAL.items():
            noise = random.uniform(0.9, 1.1)
            times.beaten(member, int(took * load * noise * slower.get(member, 1)), len(USUAL))


def slow(times: StepTimes) -> set[str]:
    return {member for member in USUAL if times.slow(member)}


def test_who_has_become_slow_and_nobody_else() -> None:
    times = StepTimes()
    beat(times, 3 * READINGS)
    assert slow(times) == set()
    beat(times, READINGS, load=7)
    assert slow(times) == set(), "it is the load"
    beat(times, READINGS, b=1.5)
    assert slow(times) == set()
    beat(times, READINGS, b=3.0)
    assert slow(times) == {"b"}
    assert 2.4 < times.slow("b") < 3.6
    beat(times, READINGS)
    assert slow(times) == set()


def test_two_members_and_one() -> None:
    times = StepTimes()
    for factor in (1, 1, 4):
        for number in range(READINGS + 1):
            times.beaten("a", 1000 + number, 2)
            times.beaten("b", 1000 * factor + number, 2)
    assert (times.slow("a"), round(times.slow("b"))) == (0, 4)
    alone = StepTimes()
    for number in range(3 * READINGS):
        alone.beaten("a", 1000 * (1 + number), 1)
    assert alone.slow("a") == 0


def test_what_is_told_twice_or_not_at_all_counts_for_nothing() -> None:
    times = StepTimes()
    beat(times, 2 * READINGS)
    for _ in range(5 * READINGS):
        times.beaten("b", 6000, len(USUAL))
    times.beaten("stranger", 1, 99)
    assert (times.slow("b"), times.slow("stranger")) == (0, 0)
    for number in range(READINGS):
        for took in (0, 6000 + number):
            times.beaten("b", took, len(USUAL))
    assert times.slow("b") > 2, "too few steps to tell are no steps"


def test_a_measurement_takes_so_many_readings_and_much_is_twice_as_long() -> None:
    times = StepTimes()
    times.beaten("b", 1024, 2)
    found = []
    for base in (1024, 2048):
        for number in range(READINGS):
            took = 8 * base if number == 0 else base + number % 2 * base // 512
            times.beaten("a", took, 2)
            found.append(times.slow("a"))
    assert found == [0.0] * (2 * READINGS - 1) + [2.0]
    times.beaten("a", 2047, 2)
    times.beaten("a", 2046, 2)
    assert times.slow("a") == 0


def test_nothing_is_measured_while_a_member_does_not_tell() -> None:
    times = StepTimes()
    for number in range(5 * READINGS):
        times.beaten("c", 0, 3)
        times.beaten("b", 1000 + number, 3)
        times.beaten("a", (1000 if number < 2 * READINGS else 9000) + number, 3)
    assert not any(map(times.slow, "abc"))
