"""Arranges rings: deals members to them, orders them, and gives each the layers that it can hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, permutations

from sealring.coordinator.planning.apportion import apportion
from sealring.coordinator.planning.demand import Demand, capacity
from sealring.coordinator.planning.links import Network
from sealring.coordinator.planning.speeds import Rate, differ
from sealring.v1 import admin_pb2

_ALL_ORDERS = 5
"""Groups up to this size are tried in every order."""

_MOST_TRIES = 128
"""The largest number of orders tried; a small group has fewer."""


@dataclass(frozen=True)
class Candidate:
    """A member as the planner sees it.

    `obstacle` says why it cannot serve now; "" if it can. With `fetches` it gets the model from another
    member first. It `lacks` models that residents are loaded from, and does not get them: it cannot hold
    those. `rate` is its measured speed with this model, if known. `shares` are the rings of other
    deployments that it serves, and `taken` the bytes of these, with those that each further engine takes
    beside its weights and caches. `longest_chunk` are the tokens of a prompt's chunk by which its compute
    device gains, 0 where it does not say; `computes_on` is that device's kind, "" where it does not say."""

    id: str
    name: str
    memory_usable: int
    trust: int
    obstacle: str = ""
    fetches: bool = False
    rate: Rate | None = None
    shares: tuple[str, ...] = ()
    taken: int = 0
    longest_chunk: int = 0
    computes_on: str = ""
    lacks: frozenset[str] = frozenset()

    @property
    def speed(self) -> float:
        """Bytes of weights a second, 0 where that is not known."""
        return self.rate.bytes_per_second if self.rate else 0.0

    @property
    def prefill(self) -> float:
        """Bytes of weights a second times tokens of a chunk, 0 where that is not known."""
        return self.rate.prefill if self.rate else 0.0

    @property
    def room(self) -> int:
        """Bytes that a plan may use of it."""
        return max(0, capacity(self.memory_usable) - self.taken)


PlannedRing = list[tuple[Candidate, int]]
"""Members in rank order, each with its number of layers."""


def preferred_places(spec: admin_pb2.DeploymentSpec, members: list[Candidate]) -> dict[str, int]:
    """The preferred order along a ring: as the operator named the members, else by name, 2 before 10."""
    if spec.members:
        return {member: place for place, member in enumerate(spec.members)}

    def natural(member: Candidate) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", member.name)
        return [(int(part), "") if part.isdecimal() else (0, part) for part in (*parts, member.id)]

    return {member.id: place for place, member in enumerate(sorted(members, key=natural))}


def deal(
    demand: Demand,
    members: list[Candidate],
    count: int,
    replicas: int,
    places: dict[str, int],
    network: Network,
) -> list[PlannedRing] | None:
    rings = []
    for group in snake(members, count, replicas):
        ring = _arrange(demand, sorted(group, key=lambda member: places[member.id]), network)
        if ring is None:
            return None
        rings.append(ring)
    return rings


def snake(members: list[Candidate], count: int, replicas: int) -> list[list[Candidate]]:
    """The strongest members in as many groups as replicas, dealt to and fro so that the groups are alike."""
    groups: list[list[Candidate]] = [[] for _ in range(replicas)]
    for turn in range(count):
        dealt = members[turn * replicas : (turn + 1) * replicas]
        for group, member in zip(groups if turn % 2 == 0 else reversed(groups), dealt, strict=True):
            group.append(member)
    return groups


def _arrange(demand: Demand, group: list[Candidate], network: Network) -> PlannedRing | None:
    """The members in the order with the fastest links in which the layers fit, or None."""
    if sum(member.room for member in group) < demand.total(len(group)):
        return None
    extras = demand.extras(len(group))
    for order in islice(_promising(demand, extras, group, network), _MOST_TRIES):
        if (shares := shares_of(demand, order)) is not None:
            return list(zip(order, shares, strict=True))
    return None


def shares_of(demand: Demand, order: Sequence[Candidate]) -> list[int] | None:
    """The layers of each member of a ring in this order, or None where they do not fit."""
    room, speeds = [member.room for member in order], [member.speed for member in order]
    extras, fair = demand.extras(len(order)), speeds if differ(speeds) else ()
    return apportion(demand.per_layer, extras, room, fair, demand.head_layers)


def _promising(
    demand: Demand, extras: Sequence[int], group: list[Candidate], network: Network
) -> Iterator[list[Candidate]]:
    """The orders in which the layers may fit: nearly always do, if layers are alike.

    Every member but the ends holds at most its longest run of layers; the ends hold the first and the last
    layers beside embedding and head, which is fewer. Whether any choice of ends will do is found first,
    without trying each.
    """
    if len(group) == 1:
        yield group
        return
    missing = len(demand.per_layer)
    first, head, tail = {}, {}, {}
    for member in group:
        room = member.room
        most = demand.longest_run(room)
        first[member.id] = demand.first_layers(room - extras[0])
        head[member.id] = first[member.id] - most
        tail[member.id] = demand.last_layers(room - extras[-1]) - most
        missing -= most
    heads, tails = (sorted(gains, key=lambda one: -gains[one])[:2] for gains in (head, tail))
    if max(head[one] + tail[other] for one in heads for other in tails if one != other) < missing:
        return
    for order in _orders(group, network):
        if not may_lead(demand, order) or first[order[0].id] < demand.head_layers:
            continue
        if head[order[0].id] + tail[order[-1].id] >= missing:
            yield order


def may_lead(demand: Demand, order: Sequence[Candidate]) -> bool:
    """Whether the first member can be the head, and the last one the tail: they lack nothing that these
    hold."""
    ends = ((rank, order[rank]) for rank in {0, len(order) - 1})
    return not any(
        one.model in end.lacks for rank, end in ends for one in demand.residents_at(rank, len(order))
    )


def _orders(group: list[Candidate], network: Network) -> Iterator[list[Candidate]]:
    """Every order of few members; else the order as given, and every pair at its ends, where the extras are.

    Those with the fastest links come first. Where links are alike, or not known, it is the order as given.
    """
    if len(group) <= _ALL_ORDERS:
        yield from network.fastest_first(list(map(list, permutations(group))))
        return
    if network.links:
        group = network.fastest_first([group, network.chain(group)])[0]
    yield group
    for head in group:
        for tail in group:
            if head is not tail:
                yield [head, *[member for member in group if member not in (head, tail)], tail]


def doubled_layers(spec: admin_pb2.DeploymentSpec) -> list[int]:
    """The layers that each rank holds beside its own, for prompts alone; none without `prompt_split`, or
    where it is 0."""
    if not any(spec.prompt_split):
        return []
    ends = zip(accumulate(spec.prompt_split), accumulate(spec.split), strict=False)
    return [prompts - answers for prompts, answers in ends]


def match(
    demand: Demand, split: Sequence[int], doubled: Sequence[int], group: list[Candidate]
) -> list[Candidate]:
    """The members as given where that fits, else the strongest to the heaviest stage. If the first of them
    cannot be the head, or the last the tail, the strongest that can changes places with it."""
    if not may_lead(demand, group):
        end = 0 if any(one.model for one in demand.residents_at(0, len(group))) else -1
        orders = [_swapped(group, end, member) for member in group]
        return max(orders, key=lambda one: (may_lead(demand, one), one[end] is group[end], one[end].room))
    if shortfall(demand, list(zip(group, split, strict=True)), doubled) is None:
        return group
    group = sorted(group, key=lambda member: -member.room)
    needs = _needs(demand, split, doubled)
    ranks = sorted(range(len(split)), key=lambda rank: (-needs[rank], rank))
    placed = dict(zip(ranks, group, strict=True))
    return [placed[rank] for rank in range(len(split))]


def _swapped(group: Sequence[Candidate], end: int, member: Candidate) -> list[Candidate]:
    order = list(group)
    order[group.index(member)], order[end] = order[end], member
    return order


def _needs(demand: Demand, split: Sequence[int], doubled: Sequence[int]) -> list[int]:
    needs, first = [], 0
    for extra, layers, more in zip(
        demand.extras(len(split)), split, doubled or [0] * len(split), strict=True
    ):
        needs.append(extra + sum(demand.per_layer[first : first + layers + more]))
        first += layers
    return needs


def shortfall(demand: Demand, ring: PlannedRing, doubled: Sequence[int]) -> tuple[Candidate, int, int] | None:
    """The first member that cannot hold its stage, its rank, and the bytes that the stage takes."""
    needs = _needs(demand, [layers for _, layers in ring], doubled)
    for rank, ((member, _), need) in enumerate(zip(ring, needs, strict=True)):
        if need > member.room:
            return member, rank, need
    return None
