"""Prefill in simulated time: what streams feel of a long prompt, and when a crowd has its first tokens.

The real scheduler against modelled stages, as in `bench.simulate`, for machines of three kinds.
"""

from __future__ import annotations

import argparse
import itertools

from bench.frame import Result
from bench.simulated_ring import SimulatedRing
from bench.summaries import percentile
from sealring.gateway.scheduler import Action, AnnounceStep, Deliver, Finish, Request
from sealring.v1 import inference_pb2 as inference

Costs = dict[str, float]

SLOW: Costs = {"step_ms": 12.0, "row_ms": 22.0, "prefill_ms": 21.0, "token_us": 13_500.0}
"""The CPU build with 12 layers x 256: every row and token costs the same."""

LINEAR: Costs = {"row_ms": 20.0, "prefill_ms": 1.0, "token_us": 15_000.0}
"""The same without anything fixed."""

BETWEEN: Costs = {"step_ms": 5.0, "row_ms": 5.0, "prefill_ms": 5.0, "token_us": 2000.0}

FAST: Costs = {"step_ms": 20.0, "prefill_ms": 20.0, "token_us": 80.0}
"""A GPU, bound by memory: a step takes as long for one row as for many."""


class WatchedRing(SimulatedRing):
    """Remembers when requests were asked, had their tokens and ended; prompts are as long as `ask` says."""

    def __init__(self, stages: int, costs: Costs, rows: int = 128, rows_in_turn: bool = False) -> None:
        names = ("step_ms", "row_ms", "prefill_ms", "token_us", "change_ms")
        options = dict.fromkeys(names, 0.0) | {"link_ms": 0.5, **costs}
        self.prompts: dict[str, int] = {}
        self.asked: dict[str, float] = {}
        self.arrivals: dict[str, list[float]] = {}
        self.ends: dict[str, float] = {}
        self.chunks: list[list[int]] = []
        super().__init__(stages, rows, 1000, argparse.Namespace(**options), rows_in_turn)

    def prompt_tokens(self, request: Request) -> int:
        return self.prompts[request.id]

    def ask(self, name: str, prompt: int, answer: int) -> None:
        self.prompts[name], self.asked[name] = prompt, self.now
        self.submit(Request(name, "key", answer, inference.Envelope()))

    def stream(self, count: int, tokens: int = 100) -> None:
        """Rows that go on and on, from the time when the first has so many tokens."""
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


def beside(machine: str, stages: int, rows: int, costs: Costs, prompt: int) -> Result:
    """A long prompt beside streams, against the streams and against the prompt by themselves."""
    ring, alone = WatchedRing(stages, costs), WatchedRing(stages, costs)
    ring.stream(rows)
    begun = ring.now
    ring.ask("long", prompt, 2)
    ring.run(until=lambda: "long" in ring.arrivals)
    alone.ask("long", prompt, 2)
    alone.run()
    quiet, busy = ring.gaps(begun / 2, begun), ring.gaps(begun, ring.now)
    return {
        "machine": machine,
        "stages": stages,
        "streams": rows,
        "prompt": prompt,
        "seconds": round(ring.now - begun, 2),
        "seconds_alone": round(alone.first_tokens()[0], 2),
        "p95_against_undisturbed": round(percentile(busy, 0.95) / percentile(quiet, 0.95), 2),
        "longest_against_undisturbed": round(busy[-1] / quiet[-1], 1),
    }


def crowd(machine: str, stages: int, count: int, costs: Costs, prompt: int, answer: int) -> Result:
    """Short prompts, all at once, on an idle ring."""
    ring = WatchedRing(stages, costs)
    for number in range(count):
        ring.ask(f"r{number}", prompt, answer)
    ring.run()
    waits = ring.first_tokens()
    return {
        "machine": machine,
        "stages": stages,
        "requests": count,
        "prompt": prompt,
        "answer": answer,
        "ttft_p50": round(percentile(waits, 0.5), 2),
        "ttft_p95": round(percentile(waits, 0.95), 2),
        "mean_seconds": round(sum(ring.ends.values()) / count, 2),
        "tokens_per_second": round(count * answer / ring.now, 1),
    }


def run() -> dict[str, list[Result]]:
    return {
        "beside": [
            beside(machine, stages, rows, costs, prompt)
            for machine, costs, stages, rows in (
                ("CPU", SLOW, 2, 4),
                ("CPU", SLOW, 3, 4),
                ("CPU", SLOW, 3, 16),
                ("GPU", FAST, 2, 64),
                ("GPU", FAST, 4, 64),
            )
            for prompt in (1041, 4096)
        ],
        "crowds": [
            crowd("CPU", 1, 16, SLOW, 28, 16),
            crowd("CPU", 2, 16, SLOW, 28, 16),
            crowd("CPU", 3, 24, SLOW, 28, 64),
            crowd("GPU", 2, 64, FAST, 30, 100),
            crowd("GPU", 2, 64, FAST, 500, 100),
        ],
    }
