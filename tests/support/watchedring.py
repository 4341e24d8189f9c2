"""A ring in simulated time, watched: what streams feel of a long prompt, when a crowd has its tokens."""

from __future__ import annotations

import itertools

from bench.simulated_ring import Costs, SimulatedRing
from sealring.gateway.scheduler import Action, AnnounceStep, Deliver, Finish, Request
from sealring.v1 import inference_pb2 as inference

SLOW = Costs(step_ms=12.0, row_ms=22.0, prefill_ms=21.0, token_us=13_500.0)
"""The CPU build with 12 layers x 256: every row and token costs the same."""

LINEAR = Costs(row_ms=20.0, prefill_ms=1.0, token_us=15_000.0)
"""The same without anything fixed."""

BETWEEN = Costs(step_ms=5.0, row_ms=5.0, prefill_ms=5.0, token_us=2000.0)

FAST = Costs(step_ms=20.0, prefill_ms=20.0, token_us=80.0)
"""A GPU, bound by memory: a step takes as long for one row as for many."""


class WatchedRing(SimulatedRing):
    """Remembers when requests were asked, had their tokens and ended; prompts are as long as `ask` says."""

    def __init__(self, stages: int, costs: Costs, rows: int = 128, rows_in_turn: bool = False) -> None:
        self.prompts: dict[str, int] = {}
        self.asked: dict[str, float] = {}
        self.arrivals: dict[str, list[float]] = {}
        self.ends: dict[str, float] = {}
        self.chunks: list[list[int]] = []
        super().__init__(stages, rows, 1000, costs, rows_in_turn)

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
