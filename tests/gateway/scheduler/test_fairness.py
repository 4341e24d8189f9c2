"""No mix of requests starves any of them."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scheduler import (
    Action,
    AnnounceStep,
    Fail,
    Finish,
    MemberMemory,
    OpenRow,
    Request,
    RingFacts,
    Scheduler,
)
from gateway.scheduler.queue import FairQueue
from gateway.scheduler.scheduler import OPEN_AHEAD
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

requests = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=60
)


def run(work: list[tuple[str, int, int]], stages: int, max_rows: int) -> list[int]:
    """Asks for everything at once; returns the requests in the order of their first chunks."""
    scheduler = Scheduler(queue_limit=1000)
    ring = RingFacts(1, (MemberMemory(1, 0, 2048),) * stages, max_rows, 64)
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
                todo.extend(scheduler.row_opened(row, prompt_tokens=prompt, params_bytes=0, max_tokens=limit))
            case AnnounceStep(step):
                for change in step.changes:
                    if change.HasField("admit"):
                        lanes.setdefault(change.admit.lane, []).append(change.admit.row)
                    for members in lanes.values():
                        if change.HasField("evict") and change.evict.row in members:
                            members.remove(change.evict.row)
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
            queue.push(Request(str(number), key, 1, inference.Envelope()))
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


def test_displacing_takes_the_newest_of_the_largest() -> None:
    queue = FairQueue(4)
    for number in range(4):
        queue.push(Request(str(number), "a" if number else "b", 1, inference.Envelope()))
    assert queue.full
    assert queue.displace("a") is None
    displaced = queue.displace("c")
    assert displaced is not None
    assert displaced.id == "3"
    assert queue.displace("b") is None
