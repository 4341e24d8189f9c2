"""Rings in simulated time: the real scheduler, modelled stages and links, and rings that are watched."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from requestkit import request_of
from ringfacts import member_with, ring_of

from sealring.gateway.scheduler import (
    Action,
    AnnounceStep,
    Deliver,
    DiscardRow,
    Fail,
    Finish,
    OpenRow,
    Request,
    Scheduler,
    StepCosts,
    StepPlanner,
    Timed,
)
from sealring.mesh.ring import Times
from sealring.v1 import control_pb2 as control

OPEN_SECONDS, ANNOUNCE_SECONDS = 0.002, 0.0003

CHUNKS = (4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the chunks that a stage times."""


@dataclass(frozen=True)
class Costs:
    """The times of steps on the whole model, of which each of n stages has an n-th, and of a link."""

    step_ms: float = 0.0
    row_ms: float = 0.0
    """Each row of a decode step."""

    change_ms: float = 0.0
    """Caches that are copied when a step's rows change."""

    prefill_ms: float = 0.0
    token_us: float = 0.0
    """Each token of a prefill step."""

    past_us: float = 0.0
    """Each token of a prefill step for every thousand tokens of its prompt before it."""

    first_chunk: Times = ()
    """Tokens of a prompt's first chunk and the seconds that it takes, instead of those two."""

    link_ms: float = 0.5

    stairs: Times = ((1, 1.0),)
    """What `step_ms` is multiplied by for a number of rows."""

    def decode(self, rows: int) -> float:
        """Seconds of a decode step on the whole model."""
        stairs = StepCosts(rows=self.stairs).decode(rows)
        return (self.step_ms * stairs + rows * self.row_ms) / 1e3

    def chunk(self, start: int, tokens: int) -> float:
        """Seconds of a prefill step on the whole model."""
        past = tokens * self.past_us * (start + tokens / 2) / 1e9
        if self.first_chunk:
            return StepCosts(tokens=self.first_chunk).chunk(tokens) + past
        return self.prefill_ms / 1e3 + tokens * self.token_us / 1e6 + past

    def timed(self, stages: int, longest: int) -> StepCosts:
        """The costs as one of `stages` stages would time them: chunks that take no longer than a second."""
        sizes = {1, 16, *(rows for rows, _ in self.stairs)}
        chunks = [(tokens, self.chunk(0, tokens) / stages) for tokens in CHUNKS if tokens <= longest]
        return StepCosts.of(
            [
                [Timed(rows, 1, self.decode(rows) / stages) for rows in sizes]
                + [Timed(1, tokens, took) for tokens, took in chunks if took <= 1.0 or tokens <= CHUNKS[1]]
            ]
        )


class _Head:
    """Knows which rows a step samples, as a head does, without the cost of a digest."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[int]] = {}
        self._under_way: deque[tuple[int, list[int]]] = deque()
        self._generated: dict[int, int] = {}

    def step(self, step: control.Step) -> None:
        for change in step.changes:
            if change.HasField("admit"):
                self.lanes.setdefault(change.admit.lane, []).append(change.admit.row)
            else:
                for rows in self.lanes.values():
                    for row in {change.evict.row}.intersection(rows):
                        rows.remove(row)
        if step.HasField("decode"):
            self._under_way.append((step.number, list(self.lanes[step.decode.lane])))
        elif step.HasField("prefill"):
            ended = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
            self._under_way.append((step.number, ended))

    def done(self) -> control.StepDone:
        number, rows = self._under_way.popleft()
        done = control.StepDone(step=number)
        for row in rows:
            self._generated[row] = self._generated.get(row, 0) + 1
            done.outputs.add(row=row, text=" word", tokens=self._generated[row])
        return done


class SimulatedRing:
    """Steps pass the stages in the order of their numbers. `cpu` are the seconds that the scheduler took."""

    def __init__(
        self,
        stages: int,
        rows: int,
        queue: int,
        costs: Costs,
        longest: int = CHUNKS[-1],
    ) -> None:
        self.now = 0.0
        self.cpu = 0.0
        self.steps = self.sampled = 0
        self.finished = self.failed = 0
        self.busy = 0.0
        self._decode = [costs.decode(number) / stages for number in range(rows + 1)]
        self._costs = costs
        self.chunk_factor = 1.0
        self._change = costs.change_ms / 1e3 / stages
        self._link = costs.link_ms / 1e3 if stages > 1 else 0.0
        self._free = [0.0] * stages
        self._lane_ready: dict[int, float] = {}
        self._rows = _Head()
        self._events: list[tuple[float, int, str, Any]] = []
        self._sequence = itertools.count()
        self.scheduler = Scheduler(queue_limit=queue)
        times = costs.timed(stages, longest)
        members = [member_with(token=1024, row=4096)] * stages
        facts = ring_of(*members, rows=rows, chunk=longest, costs=times)
        self._do(self.scheduler.attach(facts))

    @property
    def planner(self) -> StepPlanner:
        assert self.scheduler.planner is not None
        return self.scheduler.planner

    def submit(self, request: Request) -> None:
        begun = time.thread_time()
        actions = self.scheduler.submit(request, self.now)
        self.cpu += time.thread_time() - begun
        self._do(actions)

    def prompt_tokens(self, request: Request) -> int:
        return 64

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to do, or `until` holds."""
        while self._events and not until():
            self.now, _, kind, payload = heapq.heappop(self._events)
            begun = time.thread_time()
            if kind == "done":
                actions = self.scheduler.step_done(payload, self.now)
            elif kind == "executed":
                actions = self.scheduler.steps_executed(payload)
            else:
                actions = self.scheduler.row_opened(
                    control.RowOpened(
                        row=payload.row,
                        prompt_tokens=self.prompt_tokens(payload.request),
                        params_bytes=64,
                        max_tokens=payload.request.max_tokens,
                    )
                )
            self.cpu += time.thread_time() - begun
            self._do(actions)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AnnounceStep):
                self._announce(action.step)
            elif isinstance(action, OpenRow):
                self._at(self.now + OPEN_SECONDS, "opened", action)
            elif isinstance(action, Finish):
                self.finished += 1
            elif isinstance(action, Fail):
                self.failed += 1
            else:
                assert not isinstance(action, DiscardRow)

    def _announce(self, step: control.Step) -> None:
        self.steps += 1
        self._rows.step(step)
        chunks = step.prefill.chunks
        cost = self.cost(step)
        at = self.now + ANNOUNCE_SECONDS
        if step.HasField("decode"):
            at = max(at, self._lane_ready.get(step.decode.lane, 0.0))
        launched = max(at, self._free[0])
        for stage, free in enumerate(self._free):
            at = max(at, free) + cost
            self._free[stage] = at
            at += self._link
        self.busy += cost * len(self._free)
        if step.HasField("decode"):
            self._lane_ready[step.decode.lane] = at
        if not (step.HasField("decode") or chunks):
            self._at(launched, "executed", step.number)
            return
        done = self._rows.done()
        if not done.outputs:  # the head says so when it has launched it
            self._at(launched + ANNOUNCE_SECONDS, "done", done)
            return
        self.sampled += len(done.outputs)
        self._at(at + ANNOUNCE_SECONDS, "done", done)

    def cost(self, step: control.Step) -> float:
        """Seconds in one stage."""
        if step.prefill.chunks:
            took = sum(self._costs.chunk(one.start, one.end - one.start) for one in step.prefill.chunks)
            return self.chunk_factor * took / len(self._free)
        if step.HasField("decode"):
            changes = self._change * bool(step.changes)
            return self._decode[len(self._rows.lanes[step.decode.lane])] + changes
        return 0.0

    def _at(self, when: float, kind: str, payload: Any) -> None:
        heapq.heappush(self._events, (when, next(self._sequence), kind, payload))


SLOW = Costs(step_ms=12.0, row_ms=22.0, prefill_ms=21.0, token_us=13_500.0)
"""The CPU build with 12 layers x 256: every row and token costs the same."""

LINEAR = Costs(row_ms=20.0, prefill_ms=1.0, token_us=15_000.0)
"""A CPU like SLOW whose steps have hardly any fixed cost."""

BETWEEN = Costs(step_ms=5.0, row_ms=5.0, prefill_ms=5.0, token_us=2000.0)

FAST = Costs(step_ms=20.0, prefill_ms=20.0, token_us=80.0)
"""A GPU, bound by memory: a step takes as long for one row as for many."""


STAIRS = Costs(
    step_ms=86.0,
    prefill_ms=80.0,
    token_us=11_000.0,
    link_ms=0.65,
    stairs=(
        (1, 1.0),
        (2, 1.0),
        (4, 1.28),
        (6, 2.04),
        (8, 2.5),
        (9, 3.14),
        (10, 3.95),
        (32, 3.95),
        (33, 7.8),
        (64, 7.8),
    ),
)
"""A 4-bit model of 70B on an M4 Max, by figures that others published (docs/decisions/0043)."""


class WatchedRing(SimulatedRing):
    """Remembers when requests were asked, had their tokens and ended; prompts are as long as `ask` says."""

    def __init__(
        self,
        stages: int,
        costs: Costs,
        rows: int = 128,
        longest: int = CHUNKS[-1],
    ) -> None:
        self.prompts: dict[str, int] = {}
        self.asked: dict[str, float] = {}
        self.arrivals: dict[str, list[float]] = {}
        self.ends: dict[str, float] = {}
        self.chunks: list[list[int]] = []
        super().__init__(stages, rows, 1000, costs, longest)

    def prompt_tokens(self, request: Request) -> int:
        return self.prompts[request.id]

    def ask(self, name: str, prompt: int, answer: int) -> None:
        self.prompts[name], self.asked[name] = prompt, self.now
        self.submit(request_of(name, answer, "key"))

    def stream(self, count: int, tokens: int = 100) -> None:
        """Rows that go on and on, from the time when the first has `tokens` tokens."""
        for number in range(count):
            self.ask(f"stream{number}", 16, 100_000)
        self.run(until=lambda: len(self.arrivals.get("stream0", ())) > tokens)

    def first_tokens(self) -> list[float]:
        """Seconds until the first token of all but streams, shortest first."""
        return sorted(
            times[0] - self.asked[name]
            for name, times in self.arrivals.items()
            if not name.startswith("stream")
        )

    def gaps(self, begin: float, end: float, name: str = "stream") -> list[float]:
        """Seconds between the tokens of requests whose names begin so, shortest first."""
        found: list[float] = []
        for each, times in self.arrivals.items():
            if each.startswith(name):
                inside = [time for time in times if begin <= time <= end]
                found += [after - before for before, after in itertools.pairwise(inside)]
        return sorted(found)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                for request, *_ in action.pieces:
                    self.arrivals.setdefault(request.id, []).append(self.now)
            elif isinstance(action, Finish):
                self.ends[action.request.id] = self.now
            elif isinstance(action, AnnounceStep) and action.step.prefill.chunks:
                self.chunks.append([chunk.end - chunk.start for chunk in action.step.prefill.chunks])
        super()._do(actions)
