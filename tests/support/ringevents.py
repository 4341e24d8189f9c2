"""A ring as events: machines that compute layer by layer, sums that go round, records that wait for a wire.

It plays through step by step the formulae of `sealring.coordinator.planning.costs`. It adds lanes of unequal
size, rows of every length that grow and make room for new ones, ranks that wait for each other at every sum,
and records that queue.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.costs import FENCE, SEALED, Model, Shape, hop
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.links import Network
from sealring.coordinator.planning.speeds import Rate


class _Server:
    """Serves one after the other, in the order of arrival."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[tuple[Callable[[], float], Callable[[], None]]] = deque()
        self._busy = False

    def ask(self, takes: Callable[[], float], then: Callable[[], None]) -> None:
        self._waiting.append((takes, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            takes, then = self._waiting.popleft()
            self._events.after(takes(), lambda: self._done(then))

    def _done(self, then: Callable[[], None]) -> None:
        then()
        self._next()


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, happens))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, happens = heapq.heappop(self._due)
            happens()


class EventRing:
    """One shape that decodes `rows` rows in a number of lanes."""

    def __init__(self, model: Model, shape: Shape, network: Network, rows: int, lanes: int) -> None:
        self._model, self._shape, self._network = model, shape, network
        self._events = Events()
        stages = range(shape.stages)
        self._stages = [_Server(self._events) for _ in stages]
        self._carriers = [_Server(self._events) for _ in stages]
        self._wires = [_Server(self._events) for _ in stages]
        self._part = model.parts[shape.ranks]
        self._demand: Demand = model.demand(shape.ranks, 1)
        self._firsts = [sum(shape.layers[:rank]) for rank in stages]
        self._lanes: list[list[int]] = [[] for _ in range(lanes)]
        for row in range(rows):  # of every length, as rows are that came one after the other
            self._lanes[row % lanes].append(row * model.context // rows if rows > 1 else 0)
        self.tokens = 0

    def tokens_per_second(self, tokens: int) -> float:
        """The rate over `tokens` tokens, after a first step of every lane."""
        for number in range(len(self._lanes)):
            self._arrive(number, 0)
        warm = sum(map(len, self._lanes)) * 2
        self._events.run(lambda: self.tokens >= warm)
        began, had = self._events.now, self.tokens
        self._events.run(lambda: self.tokens >= had + tokens)
        return (self.tokens - had) / (self._events.now - began)

    def _arrive(self, lane: int, rank: int) -> None:
        self._stages[rank].ask(lambda: self._step(lane, rank), lambda: self._hand_on(lane, rank))

    def _hand_on(self, lane: int, rank: int) -> None:
        shape, size = self._shape, len(self._lanes[lane])
        following = (rank + 1) % shape.stages
        if shape.stages == 1:
            wire = self._network.slowest(combinations(shape.machines, 2)).latency
            seconds = (len(shape.machines) - 1) * (hop(*shape.machines) + wire)
            self._events.after(seconds, lambda: self._tokens(lane))
            return
        pair = shape.machines[rank], shape.machines[following]
        link = self._network.between(pair[0].id, pair[1].id)
        if following == 0:
            self._events.after(hop(*pair) + link.latency, lambda: self._tokens(lane))
            return
        state = size * self._model.state

        def sealed() -> None:
            self._wires[rank].ask(
                lambda: state / link.bytes_per_second,
                lambda: self._events.after(hop(*pair) + link.latency, lambda: self._arrive(lane, following)),
            )

        self._carriers[rank].ask(lambda: state / SEALED, sealed)

    def _tokens(self, lane: int) -> None:
        self.tokens += len(self._lanes[lane])
        self._lanes[lane] = [(length + 1) % self._model.context for length in self._lanes[lane]]
        self._arrive(lane, 0)

    def _step(self, lane: int, rank: int) -> float:
        """Seconds that a stage, or a tensor ring, takes for a step of this lane."""
        shape, lengths, part = self._shape, self._lanes[lane], self._part
        first, rows = self._firsts[rank], len(lengths)
        machines = shape.machines if shape.ranks > 1 else shape.machines[rank : rank + 1]
        rates = [machine.rate for machine in machines if machine.rate is not None]
        clocks = [0.0] * len(rates)
        for layer in range(first, first + shape.layers[rank]):
            caches = sum(lengths) * self._demand.row[layer]
            for _ in range(2):  # attention, then what follows it
                for index, rate in enumerate(rates):
                    whole = rate.layer_seconds + _reading(rate, part.layer_bytes[layer], rows)
                    whole += caches / (rate.kv_bytes_per_second or rate.bytes_per_second)
                    clocks[index] += whole / 2
                self._sum(machines, clocks, rows)
        if first + shape.layers[rank] == part.layers:
            head = part.head_bytes + (part.embed_bytes if part.tied else 0)
            clocks = [clock + _reading(rate, head, rows) for clock, rate in zip(clocks, rates, strict=True)]
        return max(clocks)

    def _sum(self, machines: Sequence[Candidate], clocks: list[float], rows: int) -> None:
        """Each rank sends a piece to the next and waits for that of the one before, 2(k - 1) times."""
        ranks = len(clocks)
        piece = rows * self._model.state / ranks
        if ranks > 1 and any(machine.rate is not None and machine.rate.metal for machine in machines):
            clocks[:] = [clock + FENCE for clock in clocks]
        for _ in range(2 * (ranks - 1)):
            began = list(clocks)
            for index in range(ranks):
                before = (index - 1) % ranks
                link = self._network.between(machines[before].id, machines[index].id)
                arrival = began[before] + link.latency + piece / link.bytes_per_second
                clocks[index] = max(began[index], arrival)


def _reading(rate: Rate, weights: int, rows: int) -> float:
    return weights / rate.bytes_per_second * rate.times(rows)
