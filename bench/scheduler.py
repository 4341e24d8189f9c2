"""What the scheduler costs a step, by how many rows run and how many requests wait.

The ring is a model that answers at once, so that the time is the scheduler's own (CPU); to the scheduler it
seems that a decode step takes 10 ms and prefill nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter, deque

import numpy as np

from bench.frame import Result, Table, numbers, progress
from bench.verdict import Check
from sealring.gateway.scheduler.actions import Action, AnnounceStep, OpenRow
from sealring.gateway.scheduler.facts import MemberMemory, RingFacts
from sealring.gateway.scheduler.request import Request
from sealring.gateway.scheduler.scheduler import Scheduler
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

STEP_SECONDS = 0.01
ANSWER = 200
"""Tokens of the shortest answer; the longest is twice that."""

QUICK = ("--steps", "500", "--stages", "1,3", "--longest", "10000")


class Ring:
    """Knows which rows a step samples, as a head does, without the cost of a digest."""

    def __init__(self) -> None:
        self.opening: deque[OpenRow] = deque()
        self._lanes: dict[int, list[int]] = {}
        self._under_way: deque[tuple[int, list[int], bool]] = deque()
        self._generated: Counter[int] = Counter()

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AnnounceStep):
                self._step(action.step)
            elif isinstance(action, OpenRow):
                self.opening.append(action)

    def _step(self, step: control.Step) -> None:
        for change in step.changes:
            if change.HasField("admit"):
                self._lanes.setdefault(change.admit.lane, []).append(change.admit.row)
            else:
                for rows in self._lanes.values():
                    for row in {change.evict.row}.intersection(rows):
                        rows.remove(row)
        if step.HasField("decode"):
            self._under_way.append((step.number, list(self._lanes[step.decode.lane]), True))
        elif step.HasField("prefill"):
            ended = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
            self._under_way.append((step.number, ended, False))

    def done(self) -> tuple[control.StepDone, bool]:
        """The next step, and whether it decoded."""
        number, rows, decoded = self._under_way.popleft()
        done = control.StepDone(step=number)
        for row in rows:
            self._generated[row] += 1
            done.outputs.add(row=row, text=" word", tokens=self._generated[row])
        return done, decoded


def measure(stages: int, rows: int, waiting: int, steps: int) -> Result:
    """Keeps `rows` running and `waiting` waiting while it times `steps` steps."""
    ring, scheduler = Ring(), Scheduler(queue_limit=waiting + rows)
    member = MemberMemory(1024, 4096, 1 << 40)
    ring.take(scheduler.attach(RingFacts((member,) * stages, rows, 256)))
    count, now = 0, 0.0
    times: list[float] = []
    sizes: list[int] = []
    while len(times) < steps:
        while scheduler.load().waiting < waiting:
            count += 1
            length = ANSWER + count * 37 % ANSWER
            # a new one would be refused where as many wait as are asked for
            request = Request(f"r{count}", f"k{count % 50}", length, inference.Envelope())
            request.progress.claimed = 1
            ring.take(scheduler.submit(request, 0.0))
        while ring.opening:
            opened = ring.opening.popleft()
            given = {"prompt_tokens": 20 + opened.row * 7 % 200, "params_bytes": 64}
            ring.take(
                scheduler.row_opened(
                    control.RowOpened(row=opened.row, max_tokens=opened.request.max_tokens, **given)
                )
            )
        done, decoded = ring.done()
        now += STEP_SECONDS * decoded
        begun = time.thread_time()
        actions = scheduler.step_done(done, now)
        elapsed = time.thread_time() - begun
        ring.take(actions)
        if scheduler.load().running >= rows - 16:
            times.append(elapsed * 1e6)
            sizes.append(len(done.outputs))
    return {
        "stages": stages,
        "rows": rows,
        "waiting": waiting,
        "rows_per_step_mean": round(float(np.mean(sizes)), 1),
        **{f"microseconds_{what}": round(float(of(times)), 1) for what, of in _SUMMARIES.items()},
    }


_SUMMARIES = {
    "mean": np.mean,
    "p50": np.median,
    "p99": lambda times: np.percentile(times, 99),
}


def run(options: argparse.Namespace) -> Result:
    gc.freeze()
    found: Result = {"loaded": [], "queue": []}
    for stages in options.stages:
        progress(f"{stages} stages")
        found["loaded"].append(measure(stages, 256, 1000, options.steps))
    for waiting in (1000, options.longest):
        progress(f"{waiting} requests waiting")
        found["queue"].append(measure(4, 64, waiting, options.steps))
    return found


def checks(result: Result) -> list[Check]:
    worst = max(one["microseconds_mean"] for one in result["loaded"])
    shortest, longest = (one["microseconds_mean"] for one in result["queue"])
    return [
        Check("scheduler, 1,000 waiting and 256 running, us a step", [worst], 200.0),
        Check("cost a step, longest queue against shortest", [round(longest / shortest, 2)], 1.25),
    ]


def tables(result: Result) -> list[Table]:
    rows = [*result["loaded"], *result["queue"]]
    return [Table("scheduler, microseconds a step", list(rows[0]), [list(one.values()) for one in rows])]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stages", type=numbers, default=[1, 2, 3, 4], help="beside 1,000 waiting and 256 rows"
    )
    parser.add_argument("--longest", type=int, default=100_000, help="requests of the longest queue")
    parser.add_argument("--steps", type=int, default=3000)
