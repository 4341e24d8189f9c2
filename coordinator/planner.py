"""Which members hold which layers. Pure: specification, profile and candidates in, plan or refusal out.

How it chooses, when the operator leaves it open:
- context first: the model's own context if any number of members holds it, else the largest that fits;
- then as few members as hold the weights, and one row at that context, within 90 % of their usable memory;
- the members with the most memory (then trust, then id), dealt out so that replicas are alike;
- layers in proportion to what each member has left after embedding or head (see `coordinator.apportion`).
A member serves one ring at a time. The roundabout cases (a head or tail that is too small for the embedding)
are met by trying other members at both ends of the ring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from coordinator.apportion import apportion
from coordinator.demand import Demand, capacity, check_profile
from coordinator.refusals import does_not_fit, split_does_not_fit, too_few_nodes, usable
from coordinator.specs import check_spec
from mesh.encoding import canonical_json
from mesh.errors import InvalidInput
from sealring.v1 import admin_pb2, model_pb2

DEFAULT_CONTEXT = 4096
"""Tokens, for models that name no context of their own."""

CONTEXT_STEP = 256
DEFAULT_MAX_ROWS = 64
_ALL_ORDERS = 5


@dataclass(frozen=True)
class Candidate:
    """A member as the planner sees it. `obstacle` says why it cannot serve now; empty when it can."""

    id: str
    name: str
    memory_usable: int
    trust: int
    obstacle: str = ""


Ring = list[tuple[Candidate, int]]
"""Members in rank order, each with its number of layers."""


def plan(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, candidates: Sequence[Candidate]
) -> admin_pb2.DeploymentPlan:
    """The rings of a deployment, with every default of the specification filled in.

    Raises InvalidInput (BAD_DEPLOYMENT), NotFound (UNKNOWN_NODE), ModelError (BAD_PROFILE),
    FailedPrecondition (NOT_ENOUGH_NODES, NODE_NOT_USABLE), ResourceExhausted (DOES_NOT_FIT).
    """
    spec = check_spec(spec)
    check_profile(profile)
    members = usable(spec, candidates)
    _check_shape(spec, profile)
    if spec.split:
        spec.context, rings = _by_hand(spec, profile, members)
    else:
        spec.context, rings = _by_memory(spec, profile, members)
        spec.stages = len(rings[0])
    return _finish(spec, profile, rings)


def kv_budget(stage: admin_pb2.StagePlan) -> int:
    """Bytes that a planned stage may spend on KV caches: usable memory less headroom and weights."""
    return capacity(stage.memory_usable) - stage.weight_bytes


def _check_shape(spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile) -> None:
    if profile.max_context and spec.context > profile.max_context:
        raise InvalidInput(
            f"context is {spec.context} and the model's own is {profile.max_context}",
            hint="ask for at most the model's own context",
            reason="BAD_DEPLOYMENT",
            param="context",
        )
    if spec.stages > profile.layers:
        raise InvalidInput(
            f"{spec.stages} stages are more than the model's {profile.layers} layers",
            reason="BAD_DEPLOYMENT",
            param="stages",
        )
    if spec.split and sum(spec.split) != profile.layers:
        raise InvalidInput(
            f"split adds up to {sum(spec.split)} and the model has {profile.layers} layers",
            reason="BAD_DEPLOYMENT",
            param="split",
        )


def _by_memory(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, members: list[Candidate]
) -> tuple[int, list[Ring]]:
    most = min(len(members) // spec.replicas, profile.layers)
    counts = [spec.stages] if spec.stages else list(range(1, most + 1))
    if not counts or counts[0] > most:
        raise too_few_nodes((spec.stages or 1) * spec.replicas, members)

    def attempt(context: int) -> list[Ring] | None:
        demand = Demand.of(profile, context)
        found = (_deal(demand, members, count, spec.replicas) for count in counts)
        return next((rings for rings in found if rings is not None), None)

    wanted = spec.context or profile.max_context or DEFAULT_CONTEXT
    rings = attempt(wanted)
    if rings is not None:
        return wanted, rings
    largest = _largest_context(wanted, lambda context: attempt(context) is not None)
    if spec.context or not largest:
        asked = members[: counts[-1] * spec.replicas]
        raise does_not_fit(Demand.of(profile, wanted), wanted, asked, spec.replicas, counts[-1], largest)
    rings = attempt(largest)
    if rings is None:
        raise AssertionError("a context that fitted a moment ago does not")
    return largest, rings


def _by_hand(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, members: list[Candidate]
) -> tuple[int, list[Ring]]:
    count = len(spec.split)
    if len(members) < count * spec.replicas:
        raise too_few_nodes(count * spec.replicas, members)
    wanted = spec.context or profile.max_context or DEFAULT_CONTEXT

    def rings_at(context: int) -> list[Ring]:
        demand = Demand.of(profile, context)
        if spec.members:
            by_id = {member.id: member for member in members}
            order = [by_id[member] for member in spec.members]
            groups = [order[index * count :][:count] for index in range(spec.replicas)]
        else:
            groups = [_match(demand, spec.split, group) for group in _snake(members, count, spec.replicas)]
        return [list(zip(group, spec.split, strict=True)) for group in groups]

    def fits(context: int) -> bool:
        demand = Demand.of(profile, context)
        return all(_shortfall(demand, ring) is None for ring in rings_at(context))

    context = wanted if fits(wanted) else _largest_context(wanted, fits)
    if not context or (spec.context and context != wanted):
        demand = Demand.of(profile, wanted)
        missing = next(found for ring in rings_at(wanted) if (found := _shortfall(demand, ring)) is not None)
        raise split_does_not_fit(*missing, wanted, context)
    return context, rings_at(context)


def _largest_context(wanted: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of CONTEXT_STEP below `wanted` that fits, 0 when none does."""
    low, high = 0, (wanted - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * CONTEXT_STEP):
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP


def _deal(demand: Demand, members: list[Candidate], count: int, replicas: int) -> list[Ring] | None:
    rings = []
    for group in _snake(members, count, replicas):
        ring = _arrange(demand, group)
        if ring is None:
            return None
        rings.append(ring)
    return rings


def _snake(members: list[Candidate], count: int, replicas: int) -> list[list[Candidate]]:
    """The strongest members in as many groups as replicas, dealt to and fro so that the groups are alike."""
    groups: list[list[Candidate]] = [[] for _ in range(replicas)]
    for turn in range(count):
        dealt = members[turn * replicas : (turn + 1) * replicas]
        for group, member in zip(groups if turn % 2 == 0 else reversed(groups), dealt, strict=True):
            group.append(member)
    return groups


def _arrange(demand: Demand, group: list[Candidate]) -> Ring | None:
    """The members in an order in which the layers fit, or None."""
    capacities = {member.id: capacity(member.memory_usable) for member in group}
    if sum(capacities.values()) < demand.total(len(group)):
        return None
    extras = demand.extras(len(group))
    for order in _orders(group):
        shares = apportion(demand.per_layer, extras, [capacities[member.id] for member in order])
        if shares is not None:
            return list(zip(order, shares, strict=True))
    return None


def _orders(group: list[Candidate]) -> Iterator[list[Candidate]]:
    """Strongest first; then every order of few members, or every pair at the ends, where the extras are."""
    if len(group) <= _ALL_ORDERS:
        yield from map(list, permutations(group))
        return
    yield group
    for head in group:
        for tail in group:
            if head is not tail:
                yield [head, *[member for member in group if member not in (head, tail)], tail]


def _match(demand: Demand, split: Sequence[int], group: list[Candidate]) -> list[Candidate]:
    """The strongest member to the heaviest stage."""
    needs = _needs(demand, split)
    ranks = sorted(range(len(split)), key=lambda rank: (-needs[rank], rank))
    placed = dict(zip(ranks, group, strict=True))
    return [placed[rank] for rank in range(len(split))]


def _needs(demand: Demand, split: Sequence[int]) -> list[int]:
    needs, first = [], 0
    for extra, layers in zip(demand.extras(len(split)), split, strict=True):
        needs.append(extra + sum(demand.per_layer[first : first + layers]))
        first += layers
    return needs


def _shortfall(demand: Demand, ring: Ring) -> tuple[Candidate, int, int] | None:
    """The first member that cannot hold its stage, its rank, and the bytes that the stage takes."""
    needs = _needs(demand, [layers for _, layers in ring])
    for rank, ((member, _), need) in enumerate(zip(ring, needs, strict=True)):
        if need > capacity(member.memory_usable):
            return member, rank, need
    return None


def _finish(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, rings: list[Ring]
) -> admin_pb2.DeploymentPlan:
    demand = Demand.of(profile, spec.context)
    planned = [_ring_plan(f"{spec.name}-{index}", demand, ring) for index, ring in enumerate(rings)]
    rows = (kv_budget(stage) // max(1, stage.kv_bytes) for ring in planned for stage in ring.stages)
    spec.max_rows = spec.max_rows or max(1, min(DEFAULT_MAX_ROWS, *rows))
    return admin_pb2.DeploymentPlan(
        spec=spec, profile=profile, rings=planned, plan_hash=plan_hash(spec, profile, planned)
    )


def _ring_plan(name: str, demand: Demand, ring: Ring) -> admin_pb2.RingPlan:
    stages, first = [], 0
    for rank, (member, layers) in enumerate(ring):
        end = first + layers
        stages.append(
            admin_pb2.StagePlan(
                member=member.id,
                member_name=member.name,
                rank=rank,
                first_layer=first,
                end_layer=end,
                weight_bytes=demand.weight_bytes(first, end, rank, len(ring)),
                kv_bytes=demand.row_bytes(first, end),
                memory_usable=member.memory_usable,
                trust=member.trust,
            )
        )
        first = end
    return admin_pb2.RingPlan(
        ring=name,
        stages=stages,
        min_trust=min(stage.trust for stage in stages),
        kv_budget=min(kv_budget(stage) for stage in stages),
    )


def plan_hash(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, rings: Iterable[admin_pb2.RingPlan]
) -> str:
    """SHA-256 in hex over the canonical JSON of what the members have to agree on."""
    content = {
        "deployment": spec.name,
        "model": spec.model,
        "digest": profile.digest,
        "strategy": spec.strategy,
        "context": spec.context,
        "max_rows": spec.max_rows,
        "prefill_chunk": spec.prefill_chunk,
        "rings": [
            {
                "ring": ring.ring,
                "stages": [[stage.member, stage.first_layer, stage.end_layer] for stage in ring.stages],
            }
            for ring in rings
        ],
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()
