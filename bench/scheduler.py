"""What the scheduler costs a step, by how many rows run and how many requests wait.

The ring is a model that answers at once, so that the time is the scheduler's own (CPU); to the scheduler it
seems that a decode step takes 10 ms and prefill nothing.

With `--virtual` the scheduler has Macs that are not here, in virtual time (bench.paced.virtual):

    python -m bench scheduler --virtual 2xm4max:qwen38-27b-4bit --loads static,mixed,beside,agents,sessions
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from bench.frame import Result, Table, numbers, progress
from bench.paced import virtual
from bench.paced.ring import Head
from bench.verdict import Check
from sealring.gateway.scheduler import (
    Action,
    AnnounceStep,
    MemberMemory,
    OpenRow,
    Request,
    RingFacts,
    Scheduler,
)
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

STEP_SECONDS = 0.01
ANSWER = 200
"""Tokens of the shortest answer; the longest is twice that."""

QUICK = ("--steps", "500", "--stages", "1,3", "--longest", "10000")


class Ring:
    """Rows that are opened, and steps that are done at once."""

    def __init__(self) -> None:
        self.opening: deque[OpenRow] = deque()
        self._head = Head()
        self.done = self._head.done

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AnnounceStep):
                self._head.take(action.step)
            elif isinstance(action, OpenRow):
                self.opening.append(action)


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
    """`loaded` and `queue`: microseconds a step. With `--virtual`, `simulated`: by load, figures of each ring
    and seed."""
    gc.freeze()
    if options.virtual:
        return {"simulated": {load: list(_simulated(load, options)) for load in options.loads}}
    found: Result = {"loaded": [], "queue": []}
    for stages in options.stages:
        progress(f"{stages} stages")
        found["loaded"].append(measure(stages, 256, 1000, options.steps))
    for waiting in (1000, options.longest):
        progress(f"{waiting} requests waiting")
        found["queue"].append(measure(4, 64, waiting, options.steps))
    return found


def _simulated(load: str, options: argparse.Namespace) -> Iterator[Result]:
    many, few = ("mixed", "chat"), ("agents", "sessions")
    counts = options.at_once if load in many else options.agents if load in few else options.rows
    for ring in options.virtual:
        cluster, _, model = ring.partition(":")
        for count in counts:
            for seed in options.seeds if load in (*many, *few) else options.seeds[:1]:
                progress(f"simulated: {ring}, {load} {count}")
                found = _LOADS[load](cluster, model, count, seed)
                yield {
                    "ring": ring,
                    "count": count,
                    "seed": seed,
                    **{k: round(v, 3) for k, v in found.items() if isinstance(v, int | float)},
                }


_LOADS: dict[str, Callable[[str, str, int, int], Result]] = {
    "static": lambda cluster, model, rows, seed: virtual.static(cluster, model, rows),
    "mixed": virtual.mixed,
    "chat": lambda cluster, model, count, seed: virtual.mixed(cluster, model, count, seed, name="sharegpt"),
    "beside": lambda cluster, model, rows, seed: virtual.beside(cluster, model, rows),
    "agents": lambda cluster, model, count, seed: virtual.agents(cluster, model, virtual.Agents(count), seed),
    "sessions": virtual.sessions,
}


def checks(result: Result) -> list[Check]:
    if "simulated" in result:
        return []
    worst = max(one["microseconds_mean"] for one in result["loaded"])
    shortest, longest = (one["microseconds_mean"] for one in result["queue"])
    return [
        Check("scheduler, 1,000 waiting and 256 running, us a step", [worst], 200.0),
        Check("cost a step, longest queue against shortest", [round(longest / shortest, 2)], 1.25),
    ]


def tables(result: Result) -> list[Table]:
    if "simulated" in result:
        return [
            Table(f"simulated: {load}", list(found[0]), [list(one.values()) for one in found])
            for load, found in result["simulated"].items()
        ]
    rows = [*result["loaded"], *result["queue"]]
    return [Table("scheduler, microseconds a step", list(rows[0]), [list(one.values()) for one in rows])]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stages", type=numbers, default=[1, 2, 3, 4], help="beside 1,000 waiting and 256 rows"
    )
    parser.add_argument("--longest", type=int, default=100_000, help="requests of the longest queue")
    parser.add_argument("--steps", type=int, default=3000)
    rings = parser.add_argument_group("Macs in virtual time, instead")
    rings.add_argument("--virtual", type=_words, default=[], help="rings, as 2xm4max:qwen38-27b-4bit")
    rings.add_argument("--loads", type=_words, default=list(_LOADS), help=", ".join(_LOADS))
    rings.add_argument("--rows", type=numbers, default=[4, 16], help="of static, and beside a prompt")
    rings.add_argument("--at-once", type=numbers, default=[16], help="mixed requests and chats under way")
    rings.add_argument("--agents", type=numbers, default=[4])
    rings.add_argument("--seeds", type=numbers, default=[1, 2, 3])


def _words(text: str) -> list[str]:
    return text.split(",")
