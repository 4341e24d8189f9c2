"""Why a plan is as it is, in a line for each thing that the planner chose by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sealring.coordinator.planning.arrangement import Candidate, PlannedRing
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.links import RECORD_BYTES, Network
from sealring.coordinator.planning.speeds import SLOW, differ
from sealring.mesh.units import size
from sealring.v1 import admin_pb2

_SHOWN = 8


def reasons(
    asked: admin_pb2.DeploymentSpec,
    made: admin_pb2.DeploymentSpec,
    demand: Demand,
    rings: Sequence[PlannedRing],
    able: Sequence[Candidate],
    wanted: int,
    trimmable: bool,
) -> list[str]:
    """`asked` is what the operator gave, `made` the same with every default, `able` who could have served,
    `wanted` the context that was tried first, in tokens, `trimmable` as in ModelProfile."""
    lines = []
    stages = len(rings[0])
    used = {member.id for ring in rings for member, _ in ring}
    spare = [member for member in able if not member.shares and member.id not in used]
    most = min((len(used) + len(spare)) // made.replicas, len(demand.weights))
    weights = size(sum(demand.weights) + sum(demand.outer_weights(stages)))
    holds = f"{weights} of weights and {size(sum(demand.row))} for a sequence of {made.context} tokens"
    if asked.split:
        lines.append(f"the split by hand fits: {holds}")
    elif asked.stages:
        lines.append(f"{_nodes(stages)} for each ring, as asked: {holds}")
    elif stages == 1:
        spread = f"; --stages {most} spreads it over {most}" if most > 1 else ""
        lines.append(f"fits on one node: {holds}{spread}")
    else:
        lines.append(f"{_nodes(stages)} for each ring, for {stages - 1} would not hold it: {holds}")
    if made.speculate and stages == 1:
        lines.append("no tokens are guessed: a ring of one node has no stages that are idle meanwhile")
    elif made.speculate and not trimmable:
        lines.append("no tokens are guessed: wrong ones would change the answers of this model")
    for rank in sorted({0, stages - 1}):
        where = ", ".join(ring[rank][0].name for ring in rings)
        for one in demand.residents_at(rank, stages):
            besides = f", with {size(one.bytes)} of weights, caches and room to work in" if one.bytes else ""
            lines.append(f"{one.does} at {where}{besides}")
    if made.context < wanted:
        lines.append(
            f"a context of {made.context} tokens, for {wanted} do not fit (--kv-bits 8 or more nodes help)"
        )
    for ring in rings:
        speeds = [member.speed for member, _ in ring]
        if differ(speeds) and not asked.split:
            fastest = max(speeds)
            lines += [
                f"{member.name} gets {_layers(layers)}, for it was seen to be {fastest / member.speed:.1f} "
                "times slower than the fastest with this model"
                for member, layers in ring
                if fastest >= SLOW * member.speed
            ][:_SHOWN]
    return lines


def of_order(rings: Sequence[PlannedRing], places: Mapping[str, int], network: Network) -> Iterator[str]:
    """Why a ring's members are in another order than that of their names."""
    for ring in rings[:_SHOWN]:
        order = [member for member, _ in ring]
        named = sorted(order, key=lambda member: places[member.id])
        took, other = network.round_seconds(order), network.round_seconds(named)
        if order != named and took < other:
            yield (
                f"in the order {', '.join(member.name for member in order)}, for their links: a record of "
                f"{RECORD_BYTES >> 10} KiB takes {1e3 * took:.1f} ms from first to last, and "
                f"{1e3 * other:.1f} in the order of their names"
            )


def of_members(
    asked: admin_pb2.DeploymentSpec, rings: Sequence[PlannedRing], able: Sequence[Candidate]
) -> list[str]:
    """Remarks on a plan's members that serve other rings, and on those that have to get the model first."""
    free = any(not member.shares for member in able)
    why = "as asked" if asked.members else ("the free nodes do not hold it" if free else "no node is free")
    lines = [
        f"{member.name} also serves {' and '.join(member.shares)}, and has {size(member.room)} left: {why}"
        for ring in rings
        for member, _ in ring
        if member.shares
    ][:_SHOWN]
    fetching = [member.name for ring in rings for member, _ in ring if member.fetches]
    if fetching:
        lines.append(f"{_some(fetching)} first get the model from a node that has it")
    return lines


def of_devices(rings: Sequence[PlannedRing]) -> Iterator[str]:
    """A remark on each ring whose members compute on devices of several kinds, as far as they say so."""
    for ring in rings:
        kinds: dict[str, list[str]] = {}
        for member, _ in ring:
            kinds.setdefault(member.computes_on, []).append(member.name)
        kinds.pop("", None)
        if len(kinds) > 1:
            said = "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items())
            yield f"computed on {said}. Answers equal those of one device up to the first near tie"


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
