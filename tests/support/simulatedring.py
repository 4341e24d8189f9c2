"""Rings in virtual time whose stages take what a few numbers say."""

from __future__ import annotations

from dataclasses import dataclass

from ringfacts import member_with, ring_of

from bench.paced.ring import VirtualRing, Work
from sealring.gateway.scheduler import StepCosts, Timed
from sealring.mesh.ring import Times
from sealring.v1 import control_pb2 as control

CHUNKS = (4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the chunks that a stage times."""


@dataclass(frozen=True)
class Costs:
    """The times of steps on the whole model, of which each of n stages has an n-th, and of a link."""

    step_ms: float = 0.0
    row_ms: float = 0.0
    """Each row of a decode step."""

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


class SimulatedRing(VirtualRing):
    """A ring of equal stages. `chunks` are the lengths of all prefill steps, which take `chunk_factor` times
    what they cost."""

    KEY = "key"
    chunk_factor = 1.0

    def __init__(self, stages: int, costs: Costs, rows: int = 128, longest: int = CHUNKS[-1]) -> None:
        self.costs = costs
        self.chunks: list[int] = []
        members = [member_with(token=1024, row=4096)] * stages
        facts = ring_of(*members, rows=rows, chunk=longest, costs=costs.timed(stages, longest))
        super().__init__(facts, stages, costs.link_ms / 1e3)

    def takes(self, stage: int, work: Work) -> float:
        if work.step.HasField("prefill"):
            return self.chunk_factor * self.costs.chunk(work.past, work.tokens) / self.stages
        return self.costs.decode(work.rows) / self.stages

    def announce(self, step: control.Step) -> None:
        self.chunks += [chunk.end - chunk.start for chunk in step.prefill.chunks]
        super().announce(step)

    def stream(self, count: int, tokens: int = 100) -> None:
        """Rows that go on and on, from the time when the first has `tokens` tokens."""
        for number in range(count):
            self.ask(f"stream{number}", 16, 100_000)
        self.run(until=lambda: len(self.arrivals.get("stream0", ())) > tokens)
