"""The queue in which keys take turns, and the estimate of a wait in it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requestkit import request_of

from sealring.gateway.scheduler import Request, Row, retry_after
from sealring.gateway.scheduler.queue import (
    AHEAD_SECONDS,
    MOST_KEYS,
    STEP_SECONDS,
    WINDOW,
    FairQueue,
    Pace,
    Turns,
)
from sealring.mesh.prompt.numbers import MAX_PRIORITY


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "remove", "front"]), st.sampled_from("abc")), max_size=80
    )
)
def test_the_queue_is_first_come_first_served_per_key(operations: list[tuple[str, str]]) -> None:
    queue = FairQueue(1000)
    model: dict[str, list[str]] = {key: [] for key in "abc"}
    taken: list[Request] = []
    for number, (operation, key) in enumerate(operations):
        if operation == "push":
            queue.push(request_of(str(number), 1, key), 0.0)
            model[key].append(str(number))
        elif operation == "front" and taken:
            request = taken.pop()
            queue.push_front(request)
            model[request.key].insert(0, request.id)
            assert queue.pop() is request
            model[request.key].pop(0)
        elif operation == "remove" and model[key]:
            assert queue.remove(model[key].pop()).key == key
        elif operation == "pop" and len(queue):
            request = queue.pop()
            assert model[request.key].pop(0) == request.id
            taken.append(request)
        assert len(queue) == sum(map(len, model.values()))
    left = queue.drain()
    assert {key: [request.id for request in left if request.key == key] for key in model} == model


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2), st.sampled_from([math.inf, 12.0]))),
    st.integers(0, 9),
    st.sampled_from("abcde"),
    st.integers(-2, 2),
)
def test_the_requests_ahead_of_a_new_one_are_those_taken_before_it(
    waiting: list[tuple[str, int, float]], taken: int, key: str, priority: int
) -> None:
    queue = FairQueue(1000)
    for number, (each, steps, patience) in enumerate(waiting):
        work = request_of(str(number), 1, each, priority=steps, patience=patience)
        queue.push(work, number / 2)
    given_back = [queue.pop() for _ in range(min(taken, len(queue)))][:2]
    for work in given_back:
        queue.push_front(work)
    new, now = request_of("new", 1, key, priority=priority), len(waiting) / 2
    ahead = queue.ahead(new, now)
    queue.push(new, now)
    assert queue.drain().index(new) == ahead


def test_displacing_takes_the_newest_of_the_largest() -> None:
    queue = FairQueue(4)
    for number in range(4):
        queue.push(request_of(str(number), 1, "a" if number else "b"), 0.0)
    assert queue.full
    assert queue.displace(request_of("new", 1, "a")) is None
    displaced = queue.displace(request_of("new", 1, "c"))
    assert displaced is not None
    assert displaced.id == "3"
    assert queue.displace(request_of("new", 1, "b")) is None


def test_what_goes_on_displaces_what_is_new_of_its_key() -> None:
    queue, resumed = FairQueue(3), [request_of(f"resumed{number}", 1, "a") for number in range(3)]
    for number in range(3):
        queue.push(request_of(str(number), 1, "a"), 0.0)
        resumed[number].progress.claimed = 1
    assert queue.displace(request_of("new", 1, "a")) is None
    for request, last in zip(resumed, "210", strict=True):
        displaced = queue.displace(request)
        assert displaced is not None
        assert displaced.id == last
        queue.push(request, 0.0)
    assert queue.displace(request_of("more", 1, "a")) is None
    assert queue.displace(request_of("another's", 1, "b")) is resumed[2], "a claim counts among its own alone"


arrivals = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.sampled_from("ab"),
        st.integers(-MAX_PRIORITY, MAX_PRIORITY),
        st.sampled_from([math.inf, 0.5, 5.0, 60.0]),
        st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(arrivals)
def test_nothing_is_overtaken_by_what_comes_much_later(
    coming: list[tuple[float, str, int, float, bool]],
) -> None:
    """Not by anything that comes later than its priority, and a deadline, are worth; and keys take turns."""
    queue, now = FairQueue(1000), 0.0
    came: dict[Request, float] = {}
    turns: list[str] = []
    for number, (gap, key, priority, patience, taken) in enumerate(coming):
        now += gap
        request = request_of(str(number), 1, key, priority=priority, patience=patience)
        queue.push(request, now)
        came[request] = now
        turns += [] if key in turns else [key]
        if taken:
            first = queue.pop()
            assert first.key == turns.pop(0), "turns do not depend on priorities"
            arrived = came.pop(first)
            others = [other for other in came if other.key == first.key]
            turns += [first.key] if others else []
            for other in others:
                ahead = max(AHEAD_SECONDS, -first.priority * STEP_SECONDS)
                assert arrived <= came[other] + other.priority * STEP_SECONDS + ahead + 1e-6


def test_a_priority_is_paid_with_waiting() -> None:
    queue = FairQueue(100)
    for name, now, priority in [("low", 0.0, 2), ("normal", 15.0, 0), ("late", 25.0, 0), ("high", 26.0, -1)]:
        queue.push(request_of(name, 1, "k", priority=priority), now)
    assert [queue.pop().id for _ in range(4)] == ["normal", "high", "low", "late"]


def test_a_low_priority_is_served_while_urgent_ones_keep_coming() -> None:
    queue = FairQueue(1000)
    queue.push(request_of("low", 1, "k", priority=MAX_PRIORITY), 0.0)
    for second in range(1000):
        queue.push(request_of(str(second), 1, "k", priority=-MAX_PRIORITY), float(second))
        if queue.pop().id == "low":
            break
    assert second <= 2 * MAX_PRIORITY * STEP_SECONDS


def test_a_request_that_goes_to_another_ring_keeps_its_place_and_deadline() -> None:
    here, there = FairQueue(10), FairQueue(10)
    here.push(request_of("old", 1, "k", patience=30.0), 0.0)
    (moved,) = here.drain()
    there.push(request_of("new", 1, "k"), 5.0)
    there.push(moved, 20.0)
    assert there.expired(29.0) == []
    assert [request.id for request in there.expired(30.0)] == ["old"]


def test_what_has_begun_once_has_no_deadline_any_more() -> None:
    queue = FairQueue(10)
    queue.push(request_of("a", 1, patience=1.0), 0.0)
    begun = queue.pop()
    begun.progress.deadline = math.inf
    queue.push(request_of("gone", 1, patience=1.0), 0.0)
    queue.remove("gone")
    queue.push_front(begun)
    assert queue.expired(5.0) == []
    assert queue.pop() is begun


def test_of_many_that_are_too_late_the_one_that_was_first_fails_first() -> None:
    queue = FairQueue(10)
    for patience in (30.0, 10.0, 20.0, 40.0):
        queue.push(request_of(str(patience), 1, patience=patience), 0.0)
    assert [request.patience for request in queue.expired(30.0)] == [10.0, 20.0, 30.0]
    assert [request.patience for request in queue.drain()] == [40.0]


def test_those_who_wait_will_be_begun_as_fast_as_the_last() -> None:
    pace = Pace()
    for now in (0.0, 2.0, 8.0, 12.0):
        assert pace.wait(100, now) == 0, "too little is known"
        pace.begun(now)
    pace.begun(16.0)
    assert pace.wait(10, 16.0) == 40
    assert pace.wait(10, 20.0) == 40
    assert pace.wait(10, 36.0) == pytest.approx(72), "the next one has taken longer already"
    pace.begun(15.0)
    assert pace.wait(10, 15.0) == pytest.approx(32), "a clock that goes back counts as standing"
    assert pace.wait(0, 1e9) == 0


def test_a_time_in_which_nothing_waits_is_not_counted() -> None:
    pace = Pace()
    for burst in range(5):
        for request in range(3):
            pace.begun(1000.0 * burst + request)
        pace.rest()
        assert pace.wait(1, 1000.0 * burst + 500) == (1 if burst else 0)


def test_only_the_last_requests_are_looked_at() -> None:
    pace, now = Pace(), 0.0
    for seconds in [60.0] * 50 + [0.5] * (WINDOW + 1):
        pace.begun(now)
        now += seconds
    assert pace.wait(2, now) == 1


def test_refused_clients_are_told_to_come_back_within_a_minute() -> None:
    assert [retry_after(seconds) for seconds in (0, 0.2, 2.6, 59.9, 1e9)] == [1, 1, 3, 60, 60]


def test_turns_of_many_keys_are_forgotten_and_leave_the_order_as_it_is() -> None:
    turns = Turns()
    for number in range(MOST_KEYS):
        assert turns.taken(f"key {number}") == 0
    assert turns.taken("key 1") == 1
    assert turns.taken("another") == 0
    asked = [request_of(key, 1, key) for key in ("key 1", "key 2", "key 0")]
    rows = [Row(number, request) for number, request in enumerate(asked)]
    assert turns.next(rows) == rows[2:], "its last turn is the longest ago, though nothing is known of it"
    assert turns.next(rows[:2]) == rows[1:2]
    assert turns.taken("key 0") == 0
