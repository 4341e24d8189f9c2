"""What a step costs the scheduler: 256 rows running and 1,000 requests waiting.

The ring is a model that answers at once, so the time is the scheduler's own; to the scheduler it seems that a
decode step takes 10 ms and prefill nothing. Target: 200 us a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import deque
from typing import Any

from bench.frame import Benchmark, Result, Table
from bench.verdict import Check
from sealring.gateway.scheduler import (
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
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

TARGET_MICROSECONDS = 200.0
STEP_SECONDS = 0.01


class Ring:
    """Knows which rows a step samples, as a head does, without the cost of a digest."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[int]] = {}
        self.under_way: deque[tuple[int, list[int], bool]] = deque()
        self.opening: deque[OpenRow] = deque()
        self.generated: dict[int, int] = {}
        self.finished = 0
        self.decoded = False  # by the last step that is done

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AnnounceStep):
                self.step(action.step)
            elif isinstance(action, OpenRow):
                self.opening.append(action)
            elif isinstance(action, Finish | Fail):
                self.finished += 1

    def step(self, step: control.Step) -> None:
        for change in step.changes:
            if change.HasField("admit"):
                self.lanes.setdefault(change.admit.lane, []).append(change.admit.row)
            else:
                for rows in self.lanes.values():
                    for row in {change.evict.row, change.park.row}.intersection(rows):
                        rows.remove(row)
        if step.HasField("decode"):
            self.under_way.append((step.number, list(self.lanes[step.decode.lane]), True))
        elif step.HasField("prefill"):
            ended = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
            self.under_way.append((step.number, ended, False))

    def done(self) -> control.StepDone:
        number, rows, self.decoded = self.under_way.popleft()
        done = control.StepDone(step=number)
        for row in rows:
            self.generated[row] = self.generated.get(row, 0) + 1
            done.outputs.add(row=row, text=" word", tokens=self.generated[row])
        return done


def measure(stages: int, rows: int, waiting: int, steps: int, answer: int) -> dict[str, object]:
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
            length = answer + count * 37 % answer
            request = Request(f"r{count}", f"k{count % 50}", length, inference.Envelope())
            ring.take(scheduler.submit(request, 0.0))
        while ring.opening:
            row, request = ring.opening.popleft()
            prompt = 20 + row * 7 % 200
            ring.take(
                scheduler.row_opened(
                    row, prompt_tokens=prompt, params_bytes=64, max_tokens=request.max_tokens
                )
            )
        done = ring.done()
        now += STEP_SECONDS * ring.decoded
        begun = time.thread_time()
        actions = scheduler.step_done(done, now)
        elapsed = time.thread_time() - begun
        ring.take(actions)
        if scheduler.load().running >= rows - 16:
            times.append(elapsed * 1e6)
            sizes.append(len(done.outputs))
    times_sorted = sorted(times)
    return {
        "stages": stages,
        "rows": rows,
        "waiting": waiting,
        "steps": steps,
        "rows_per_step_mean": round(statistics.fmean(sizes), 1),
        "microseconds_mean": round(statistics.fmean(times), 1),
        "microseconds_p50": round(times_sorted[len(times) // 2], 1),
        "microseconds_p99": round(times_sorted[len(times) * 99 // 100], 1),
        "requests_finished": ring.finished,
    }


def run(options: argparse.Namespace) -> Result:
    gc.freeze()
    runs = [
        measure(stages, options.rows, max(waiting, 1), options.steps, options.answer)
        for stages in options.stages
        for waiting in options.waiting
    ]
    return {"target_microseconds": TARGET_MICROSECONDS, "runs": runs}


def checks(result: Result) -> list[Check]:
    found = [one for one in result["runs"] if one["waiting"] == 1000]
    worst = max((one["microseconds_mean"] for one in found), default=None)
    return [Check("scheduler, 1,000 waiting and 256 running, us a step", [worst], TARGET_MICROSECONDS)]


def tables(result: Result) -> list[Table]:
    keys = (
        "stages",
        "rows",
        "waiting",
        "rows_per_step_mean",
        "microseconds_mean",
        "microseconds_p50",
        "microseconds_p99",
    )
    return [
        Table("scheduler, microseconds a step", keys, [[one[key] for key in keys] for one in result["runs"]])
    ]


def chart(result: Result, figure: Any) -> None:
    axes = figure.subplots()
    for stages in sorted({one["stages"] for one in result["runs"]}):
        runs = [one for one in result["runs"] if one["stages"] == stages]
        waiting = [max(1, one["waiting"]) for one in runs]
        axes.plot(waiting, [one["microseconds_mean"] for one in runs], marker="o", label=f"{stages} stages")
    axes.axhline(TARGET_MICROSECONDS, color="gray", linestyle="--")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests waiting")
    axes.set_ylabel("us a step")
    axes.legend()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 1000, 10000])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--answer", type=int, default=200, help="shortest answer; the longest is twice that")


BENCHMARK = Benchmark(
    "scheduler",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--steps", "500", "--stages", "1", "3", "--waiting", "0", "1000"),
)
