"""No mix of requests starves any of them."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.gateway.scheduler.actions import (
    Action,
    AnnounceStep,
    DiscardRow,
    Fail,
    Finish,
    MemberMemory,
    OpenRow,
    RingFacts,
)
from sealring.gateway.scheduler.planner import AHEAD
from sealring.gateway.scheduler.queue import AHEAD_SECONDS, STEP_SECONDS, FairQueue
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import OPEN_AHEAD, Scheduler
from sealring.mesh.prompt.validate import MAX_PRIORITY
from sealring.mesh.ring.composition import Composition
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

requests = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=60
)


def run(work: list[tuple[str, int, int]], stages: int, max_rows: int) -> list[int]:
    """Asks for everything at once; returns the requests in the order of their first chunks."""
    scheduler = Scheduler(queue_limit=1000)
    ring = RingFacts((MemberMemory(1, 0, 2048),) * stages, max_rows, 64)
    todo: deque[Action] = deque(scheduler.attach(ring))
    steps: deque[tuple[int, list[int]]] = deque()
    lanes: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    tokens: Counter[int] = Counter()
    started: list[int] = []
    ended = 0
    for index, (key, _, limit) in enumerate(work):
        todo.extend(scheduler.submit(Request(str(index), key, limit, inference.Envelope()), 0.0))
    while todo or steps:
        if not todo:
            number, sampled = steps.popleft()
            done = control.StepDone(step=number)
            for row in sampled:
                tokens[row] += 1
                done.outputs.add(row=row, text="x", tokens=tokens[row])
            todo.extend(scheduler.step_done(done, 0.0))
            continue
        action = todo.popleft()
        match action:
            case OpenRow(row, request):
                rows[row] = int(request.id)
                _, prompt, limit = work[int(request.id)]
                todo.extend(
                    scheduler.row_opened(
                        control.RowOpened(row=row, prompt_tokens=prompt, params_bytes=0, max_tokens=limit)
                    )
                )
            case AnnounceStep(step):
                for change in step.changes:
                    if change.HasField("admit"):
                        lanes.setdefault(change.admit.lane, []).append(change.admit.row)
                    for members in lanes.values():
                        for row in {change.evict.row}.intersection(members):
                            members.remove(row)
                started.extend(rows[chunk.row] for chunk in step.prefill.chunks if chunk.start == 0)
                if step.HasField("decode"):
                    steps.append((step.number, list(lanes[step.decode.lane])))
                elif step.HasField("prefill"):
                    ends = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
                    steps.append((step.number, ends))
            case Finish():
                ended += 1
            case Fail():
                raise AssertionError(action)
    assert ended == len(work) == len(started)
    return started


@settings(deadline=None, max_examples=60)
@given(requests, st.integers(1, 4), st.integers(1, 12))
def test_everybody_starts_in_turn(work: list[tuple[str, int, int]], stages: int, max_rows: int) -> None:
    """Before the nth request of a key start at most n requests of every other key, and what was opened."""
    started = run(work, stages, max_rows)
    keys = {key for key, _, _ in work}
    ahead: Counter[str] = Counter()
    for index, (key, _, _) in enumerate(work):
        ahead[key] += 1
        assert started.index(index) <= ahead[key] * len(keys) + OPEN_AHEAD


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
            queue.push(Request(str(number), key, 1, inference.Envelope()), 0.0)
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
def test_so_many_are_ahead_of_a_request_as_are_taken_before_it(
    waiting: list[tuple[str, int, float]], taken: int, key: str, priority: int
) -> None:
    queue = FairQueue(1000)
    for number, (each, steps, patience) in enumerate(waiting):
        work = Request(str(number), each, 1, inference.Envelope(), priority=steps, patience=patience)
        queue.push(work, number / 2)
    given_back = [queue.pop() for _ in range(min(taken, len(queue)))][:2]
    for work in given_back:
        queue.push_front(work)
    new, now = Request("new", key, 1, inference.Envelope(), priority=priority), len(waiting) / 2
    ahead = queue.ahead(new, now)
    queue.push(new, now)
    assert queue.drain().index(new) == ahead


def test_displacing_takes_the_newest_of_the_largest() -> None:
    queue = FairQueue(4)
    for number in range(4):
        queue.push(Request(str(number), "a" if number else "b", 1, inference.Envelope()), 0.0)
    assert queue.full
    assert queue.displace("a") is None
    displaced = queue.displace("c")
    assert displaced is not None
    assert displaced.id == "3"
    assert queue.displace("b") is None


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
    came: dict[str, float] = {}
    for number, (gap, key, priority, patience, taken) in enumerate(coming):
        now += gap
        request = Request(str(number), key, 1, inference.Envelope(), priority=priority, patience=patience)
        queue.push(request, now)
        came[request.id] = now
        if taken:
            before = {key: len(waiting) for key, waiting in queue.turns.items()}
            first = queue.pop()
            assert first.key == next(iter(before)), "turns do not depend on priorities"
            for _, _, other in queue.turns.get(first.key, []):
                ahead = max(AHEAD_SECONDS, -first.priority * STEP_SECONDS)
                assert came[first.id] <= came[other.id] + other.priority * STEP_SECONDS + ahead + 1e-6


def test_a_priority_is_paid_with_waiting() -> None:
    queue = FairQueue(100)
    for name, now, priority in [("low", 0.0, 2), ("normal", 15.0, 0), ("late", 25.0, 0), ("high", 26.0, -1)]:
        queue.push(Request(name, "k", 1, inference.Envelope(), priority=priority), now)
    assert [queue.pop().id for _ in range(4)] == ["normal", "high", "low", "late"]


def test_who_says_nothing_of_a_priority_goes_before_who_gave_one_up() -> None:
    queue = FairQueue(100)
    queue.push(Request("low", "k", 1, inference.Envelope(), priority=1), 0.0)
    queue.push(Request("plain", "k", 1, inference.Envelope()), STEP_SECONDS - 0.1)
    assert [queue.pop().id for _ in range(2)] == ["plain", "low"]


def test_a_low_priority_is_served_while_urgent_ones_keep_coming() -> None:
    queue = FairQueue(1000)
    queue.push(Request("low", "k", 1, inference.Envelope(), priority=MAX_PRIORITY), 0.0)
    for second in range(1000):
        queue.push(Request(str(second), "k", 1, inference.Envelope(), priority=-MAX_PRIORITY), float(second))
        if queue.pop().id == "low":
            break
    assert second <= 2 * MAX_PRIORITY * STEP_SECONDS


def test_what_is_to_be_soon_goes_first_and_what_is_too_late_fails() -> None:
    scheduler = Scheduler(queue_limit=100)
    scheduler.submit(Request("a", "k", 1, inference.Envelope()), 0.0)
    scheduler.submit(Request("b", "k", 1, inference.Envelope(), patience=2.0), 1.0)
    scheduler.submit(Request("c", "k", 1, inference.Envelope(), patience=8.0), 1.0)
    assert scheduler.expire(2.9) == []
    (failed,) = scheduler.expire(3.0)
    assert isinstance(failed, Fail)
    assert (failed.request.id, failed.error.reason, failed.error.code) == (
        "b",
        "DEADLINE_PASSED",
        "DEADLINE_EXCEEDED",
    )
    assert [request.id for request in scheduler.drain()] == ["c", "a"]
    assert scheduler.expire(1e9) == []


def test_a_row_that_waits_for_memory_is_given_back_and_one_that_has_begun_goes_on() -> None:
    scheduler = Scheduler(queue_limit=100)
    scheduler.attach(RingFacts((MemberMemory(1, 0, 512),), 8, 64))
    for name in ("runs", "waits"):
        actions = scheduler.submit(Request(name, "k", 200, inference.Envelope(), patience=1.0), 0.0)
        (opened,) = [action for action in actions if isinstance(action, OpenRow)]
        scheduler.row_opened(
            control.RowOpened(row=opened.row, prompt_tokens=200, params_bytes=0, max_tokens=200)
        )
    assert scheduler.expire(0.999) == []
    discarded, failed = scheduler.expire(1.0)
    assert discarded == DiscardRow(2)
    assert isinstance(failed, Fail)
    assert failed.request.id == "waits"
    assert scheduler.load().running == 1


def test_a_request_that_goes_to_another_ring_keeps_its_place_and_deadline() -> None:
    here, there = FairQueue(10), FairQueue(10)
    here.push(Request("old", "k", 1, inference.Envelope(), patience=30.0), 0.0)
    (moved,) = here.drain()
    there.push(Request("new", "k", 1, inference.Envelope()), 5.0)
    there.push(moved, 20.0)
    assert there.expired(29.0) == []
    assert [request.id for request in there.expired(30.0)] == ["old"]


def test_what_has_begun_once_has_no_deadline_any_more() -> None:
    queue = FairQueue(10)
    queue.push(Request("a", "", 1, inference.Envelope(), patience=1.0), 0.0)
    begun = queue.pop()
    begun.progress.deadline = math.inf
    queue.push(Request("gone", "", 1, inference.Envelope(), patience=1.0), 0.0)
    queue.remove("gone")
    queue.push_front(begun)
    assert queue.expired(5.0) == []
    assert queue.pop() is begun


def test_of_many_that_are_too_late_the_one_that_was_first_fails_first() -> None:
    queue = FairQueue(10)
    for patience in (30.0, 10.0, 20.0, 40.0):
        queue.push(Request(str(patience), "", 1, inference.Envelope(), patience=patience), 0.0)
    assert [request.patience for request in queue.expired(30.0)] == [10.0, 20.0, 30.0]
    assert [request.patience for request in queue.drain()] == [40.0]


def test_a_removed_request_may_come_back() -> None:
    queue = FairQueue(1000)
    requests = [Request(str(number), "k", 1, inference.Envelope(), patience=50.0) for number in range(300)]
    for request in requests:
        queue.push(request, 0.0)
    for request in requests[:299]:
        assert queue.remove(request.id) is request
        queue.push_front(request)
    assert queue.pop() is requests[298]
    assert len(queue) == 299
    assert len(queue.expired(51.0)) == 299
    with pytest.raises(KeyError):
        queue.pop()


def test_a_key_whose_prompts_the_head_still_reads_holds_up_itself_alone() -> None:
    """Its prompts take all the room that there is, and another key's is opened and begun all the same."""
    scheduler, opened = Scheduler(queue_limit=1000), dict[str, int]()
    actions = scheduler.attach(RingFacts((MemberMemory(1, 0, 2048),), 4, 64))
    for index in range(2 * OPEN_AHEAD):
        actions += scheduler.submit(Request(f"costly {index}", "a", 5, inference.Envelope()), 0.0)
    for index in range(3):
        actions += scheduler.submit(Request(f"short {index}", "b", 5, inference.Envelope()), 0.0)
    for action in actions:
        assert isinstance(action, OpenRow)
        opened[action.request.id] = action.row
    assert [name for name in opened if name.startswith("short")] == ["short 0"]
    row = opened["short 0"]
    answer = control.RowOpened(row=row, prompt_tokens=3, params_bytes=0, max_tokens=5)
    begun = scheduler.row_opened(answer)
    steps = [action.step for action in begun if isinstance(action, AnnounceStep)]
    assert [chunk.row for step in steps for chunk in step.prefill.chunks] == [row]
    assert [action.request.id for action in begun if isinstance(action, OpenRow)] == ["short 1"]


@given(st.permutations(range(1 + AHEAD)))
def test_rows_begin_in_the_order_in_which_their_prompts_are_read(order: list[int]) -> None:
    """Members take steps in which a row begins after others with higher numbers."""
    scheduler = Scheduler(queue_limit=10)
    actions = scheduler.attach(RingFacts((MemberMemory(1, 0, 2048),), 8, 64))
    composition = Composition(epoch=1, max_rows=8, prefill_chunk=64)
    for index in order:
        actions += scheduler.submit(Request(f"{index}", f"{index}", 5, inference.Envelope()), 0.0)
    rows = [action.row for action in actions if isinstance(action, OpenRow)]
    begun = list[int]()
    for place in order:
        opened = control.RowOpened(row=rows[place], prompt_tokens=3, params_bytes=0, max_tokens=5)
        todo = deque(scheduler.row_opened(opened))
        while todo:
            if isinstance(action := todo.popleft(), AnnounceStep):
                step = composition.apply(action.step)
                begun.extend(chunk.row for chunk in step.chunks)
                todo.extend(scheduler.steps_executed(step.number))
    assert begun == [rows[place] for place in order]
