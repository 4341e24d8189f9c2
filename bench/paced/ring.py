"""The real scheduler over a ring in virtual time: an hour of it takes some seconds.

Nothing but the scheduler is the product's. Stages compute steps in the order of their numbers, each as long
as `VirtualRing.takes` says, and the head answers at once. Subclasses say what steps cost, which drafts are
right and what is kept on disk. A ring whose stages share processors has a `VirtualGateway` alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sealring.gateway.scheduler import (
    Action,
    AnnounceStep,
    Deliver,
    Fail,
    Finish,
    OpenRow,
    Request,
    RingFacts,
    Scheduler,
)
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference


class VirtualGateway:
    """The scheduler, its requests and the time. `arrivals` are the moments of each request's tokens."""

    KEY: str | None = None
    """The key of all requests; without it each has its own."""

    OPEN_SECONDS = 0.002
    now = 0.0

    def __init__(self, facts: RingFacts) -> None:
        self.asked: dict[str, float] = {}
        self.prompts: dict[str, int] = {}
        self.arrivals: dict[str, list[float]] = {}
        self.ended: deque[str] = deque()
        self.cached: dict[str, int] = {}
        self.rows: dict[int, Request] = {}
        self._events: list[tuple[float, int, Callable[[], Iterable[Action] | None]]] = []
        self._sequence = itertools.count()
        self._facts = facts
        self.attach()

    def attach(self) -> None:
        """An epoch of which nothing is known yet."""
        self._events.clear()
        self.scheduler = Scheduler(queue_limit=1000)
        self.perform(self.scheduler.attach(self._facts))

    def ask(self, name: str, prompt: int, answer: int) -> None:
        """Sends a request for `answer` tokens behind a prompt of `prompt`."""
        self.asked[name], self.prompts[name] = self.now, prompt
        request = Request(name, name if self.KEY is None else self.KEY, answer, inference.Envelope())
        self.perform(self.scheduler.submit(request, self.now))

    def at(self, when: float, event: Callable[[], Iterable[Action] | None]) -> None:
        heapq.heappush(self._events, (when, next(self._sequence), event))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Runs until nothing is left to do, or `until` holds."""
        while self._events and not until():
            self.now, _, event = heapq.heappop(self._events)
            self.perform(event() or ())

    def first(self, name: str) -> float:
        """Seconds to the first token."""
        return self.arrivals[name][0] - self.asked[name]

    def whole(self, name: str) -> float:
        """Seconds to the last token."""
        return self.arrivals[name][-1] - self.asked[name]

    def firsts(self, names: str) -> list[float]:
        """Seconds to the first token of requests whose names begin so."""
        return [self.first(name) for name in self.arrivals if name.startswith(names)]

    def gaps(self, names: str, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between tokens of requests whose names begin so, in a time."""
        found = []
        for name, times in self.arrivals.items():
            if name.startswith(names):
                inside = [moment for moment in times if begin <= moment <= end]
                found += [after - before for before, after in itertools.pairwise(inside)]
        return found

    def tokens(self, begin: float, end: float) -> int:
        return sum(begin < moment <= end for times in self.arrivals.values() for moment in times)

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.act(action)

    def act(self, action: Action) -> None:
        assert not isinstance(action, Fail)
        if isinstance(action, AnnounceStep):
            self.announce(action.step)
        elif isinstance(action, OpenRow):
            self.rows[action.row] = action.request
            self.at(self.now + self.OPEN_SECONDS, lambda: self.scheduler.row_opened(self.opened(action.row)))
        elif isinstance(action, Deliver):
            for request, delta, _ in action.pieces:
                times = self.arrivals.setdefault(request.id, [])
                times += [self.now] * (delta.tokens - len(times))
        elif isinstance(action, Finish):
            self.ended.append(action.request.id)
            self.cached[action.request.id] = action.finished.cached_tokens

    def opened(self, row: int) -> control.RowOpened:
        """What the head says of a row."""
        request = self.rows[row]
        tokens = self.prompts[request.id]
        return control.RowOpened(
            row=row, prompt_tokens=tokens, params_bytes=64, max_tokens=request.max_tokens
        )

    def announce(self, step: control.Step) -> None:
        raise NotImplementedError


class Head:
    """Knows which rows a step samples, as a head does, without the cost of a digest."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[int]] = {}
        self._under_way: deque[tuple[int, list[int], bool]] = deque()
        self.generated: dict[int, int] = {}

    def take(self, step: control.Step) -> None:
        for change in step.changes:
            if change.HasField("admit"):
                self.lanes.setdefault(change.admit.lane, []).append(change.admit.row)
            elif change.HasField("evict"):
                for rows in self.lanes.values():
                    for row in {change.evict.row}.intersection(rows):
                        rows.remove(row)
        if step.HasField("decode"):
            self._under_way.append((step.number, list(self.lanes[step.decode.lane]), True))
        elif step.HasField("prefill"):
            ended = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
            self._under_way.append((step.number, ended, False))

    def done(self) -> tuple[control.StepDone, bool]:
        """The next step, and whether it decoded."""
        number, rows, decoded = self._under_way.popleft()
        done = control.StepDone(step=number)
        for row in rows:
            self.generated[row] = self.generated.get(row, 0) + 1
            delta = inference.Delta(text=" word", tokens=self.generated[row])
            done.outputs.add(row=row, delta=delta)
        return done, decoded


class Work(NamedTuple):
    """What each stage computes in a step: `tokens` tokens of each of `rows` rows, behind `past` ones."""

    rows: int
    tokens: int
    past: int
    step: control.Step


class VirtualRing(VirtualGateway):
    """A ring of `stages` stages. A record takes `hop` seconds to the next of them."""

    ANNOUNCE_SECONDS = 0.0003

    def __init__(self, facts: RingFacts, stages: int, hop: float) -> None:
        self.stages, self.hop = stages, hop if stages > 1 else 0.0
        self._free = [0.0] * stages
        self.begun: dict[str, float] = {}
        super().__init__(facts)

    def attach(self) -> None:
        self.head = self.new_head()
        self._ready: dict[int, float] = {}  # when the tokens of a lane's last step are at the head
        self._context: dict[int, int] = {}
        super().attach()

    def new_head(self) -> Head:
        return Head()

    def takes(self, stage: int, work: Work) -> float:
        """Seconds of a step in one stage."""
        raise NotImplementedError

    def travels(self, work: Work) -> float:
        """Seconds that a record takes longer because of its size."""
        return 0.0

    def opened(self, row: int) -> control.RowOpened:
        opened = super().opened(row)
        self._context[row] = opened.prompt_tokens
        return opened

    def announce(self, step: control.Step) -> None:
        self.head.take(step)
        at, work = self.now + self.ANNOUNCE_SECONDS, None
        if step.HasField("decode"):
            lane = self.head.lanes[step.decode.lane]
            at = max(at, self._ready.get(step.decode.lane, 0.0))
            for row in lane:
                self._context[row] += 1
            work = Work(len(lane), 1, sum(self._context[row] for row in lane) // max(1, len(lane)), step)
        elif step.HasField("prefill"):
            (chunk,) = step.prefill.chunks
            self.begun.setdefault(self.rows[chunk.row].id, self.now)
            work = Work(1, chunk.end - chunk.start, chunk.start, step)
        launched = max(at, self._free[0])
        if work is None:
            self.at(launched, lambda: self.scheduler.steps_executed(step.number))
            return
        travels = self.travels(work)
        for stage in range(self.stages):
            at = self._free[stage] = max(at, self._free[stage]) + self.takes(stage, work)
            at += self.hop + travels * (stage < self.stages - 1)
        if step.HasField("decode"):
            self._ready[step.decode.lane] = at
        done, _ = self.head.done()
        for output in done.outputs:
            self.sampled(output)
        when = at if done.outputs else launched  # without outputs the head says so when it has launched it
        self.at(when + self.ANNOUNCE_SECONDS, lambda: self.scheduler.step_done(done, self.now))

    def sampled(self, output: control.RowOutput) -> None:
        """The head finds out whether an answer ends."""
        if output.delta.tokens == self.rows[output.row].max_tokens:
            output.finish = inference.FINISH_REASON_LENGTH
