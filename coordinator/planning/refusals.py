"""Refusals of plans: the nodes that cannot serve, and the sizes that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import HEADROOM_PERCENT, Demand
from sealring.mesh.errors import FailedPrecondition, NotFound, ResourceExhausted
from sealring.mesh.trust.levels import SCORES, TrustLevel, level_of
from sealring.mesh.units import size
from sealring.v1 import admin_pb2

_SHOWN = 8


def usable(spec: admin_pb2.DeploymentSpec, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The members that this deployment may use: first those that serve nothing else, of these those that have
    the model, and then the strongest.

    Raises NotFound (UNKNOWN_NODE) for a name that is no member's, FailedPrecondition (NODE_NOT_USABLE)
    for one that cannot serve, (NOT_ENOUGH_NODES) when nobody can.
    """
    if spec.members:
        candidates = _named(spec, candidates)
    able = [member for member in candidates if not _obstacle(member, spec.trust_floor)]
    if not able:
        raise FailedPrecondition(
            f"no node can serve{_unable(spec, candidates)}" if candidates else "no node has joined",
            hint="start nodes, end what they serve, or lower the trust floor",
            reason="NOT_ENOUGH_NODES",
            available=0,
        )
    return sorted(able, key=lambda one: (bool(one.shares), one.fetches, -one.room, -one.trust, one.id))


def _named(spec: admin_pb2.DeploymentSpec, candidates: Sequence[Candidate]) -> list[Candidate]:
    by_id = {member.id: member for member in candidates}
    for identifier in spec.members:
        member = by_id.get(identifier)
        if member is None:
            raise NotFound(
                f"there is no node {identifier}",
                hint="list the nodes",
                reason="UNKNOWN_NODE",
                param="members",
            )
        if obstacle := _obstacle(member, spec.trust_floor):
            raise FailedPrecondition(
                f"node {member.name} cannot serve: {obstacle}",
                hint="leave it out, or put that right",
                reason="NODE_NOT_USABLE",
                param="members",
                member=identifier,
            )
    return [by_id[identifier] for identifier in spec.members]


def _obstacle(member: Candidate, floor: int) -> str:
    if member.obstacle:
        return member.obstacle
    if member.trust < max(1, floor):
        least = max(SCORES[TrustLevel.SOFTWARE], floor)
        return f"its trust level {level_of(member.trust)} is below the floor {level_of(least)}"
    if not member.memory_usable:
        return "it reports no usable memory"
    if not member.room:
        return f"{' and '.join(member.shares)} may take all of its memory"
    return ""


def _unable(spec: admin_pb2.DeploymentSpec, candidates: Sequence[Candidate]) -> str:
    """The members that cannot serve, each with its reason."""
    obstacles = ((member, _obstacle(member, spec.trust_floor)) for member in candidates)
    unable = [f"{member.name}: {obstacle}" for member, obstacle in obstacles if obstacle]
    more = [f"and {len(unable) - _SHOWN} more"] if len(unable) > _SHOWN else []
    return f" ({'; '.join([*unable[:_SHOWN], *more])})" if unable else ""


def too_few_nodes(
    spec: admin_pb2.DeploymentSpec, needed: int, members: Sequence[Candidate], candidates: Sequence[Candidate]
) -> FailedPrecondition:
    """The deployment asks for more members than can serve; `candidates` are these and the others."""
    unable = "" if spec.members else _unable(spec, candidates)
    return FailedPrecondition(
        f"the deployment needs {needed} nodes and {len(members)} can serve{unable}",
        hint="add nodes, or ask for fewer stages or replicas",
        reason="NOT_ENOUGH_NODES",
        needed=needed,
        available=len(members),
    )


def no_heads(model: str, members: Sequence[Candidate], end: str) -> FailedPrecondition:
    """Members of which each ring's `end`, head or tail, would be one: too few have a model that it needs
    too."""
    names = ", ".join(member.name for member in members[:_SHOWN])
    return FailedPrecondition(
        f"the {end} of each ring needs the draft model {model}, and not enough of {names} have it",
        hint=f"fetch it there: sealring model pull {model} --node NODE",
        reason="NO_DRAFT_MODEL",
        param="draft",
    )


def does_not_fit(
    demand: Demand, context: int, members: Sequence[Candidate], replicas: int, stages: int, largest: int
) -> ResourceExhausted:
    """No assignment fits. `largest` is the longest context that would, 0 when none does."""
    needed = demand.total(stages) * replicas
    available = sum(member.room for member in members)
    weights = sum(demand.weights) + sum(demand.outer_weights(stages))
    logits = f", {size(demand.logits * demand.rows)} of logits" if demand.logits else ""
    biggest = max(demand.per_layer)
    message = (
        f"the model needs {size(needed)} ({size(weights)} of weights{logits} and {size(sum(demand.row))} for "
        f"one sequence of {context} tokens"
        + (f", times {replicas} replicas" if replicas > 1 else "")
        + ") and "
        f"{_nodes(len(members))} {size(available)} to give"
    )
    if needed <= available and demand.head_layers > 1:
        what = next(one.name for one in demand.residents if one.layers == demand.head_layers)
        message += f", but {what} needs the first {demand.head_layers} layers at one node, the head"
    elif needed <= available:
        message += f", but no cut into layers of up to {size(biggest)} fits each node"
    shown = ", ".join(f"{member.name}: {size(member.room)}" for member in members[:_SHOWN])
    return ResourceExhausted(
        message,
        hint=_hint(largest) + _others(members),
        reason="DOES_NOT_FIT",
        needed_bytes=needed,
        available_bytes=available,
        headroom_percent=HEADROOM_PERCENT,
        largest_context=largest,
        nodes=shown,
    )


def split_does_not_fit(
    member: Candidate, rank: int, needed: int, context: int, largest: int
) -> ResourceExhausted:
    """One stage of a split by hand is too large for its member."""
    available = member.room
    return ResourceExhausted(
        f"stage {rank} needs {size(needed)} with {context} tokens of context and node {member.name} "
        f"has {size(available)} to give",
        hint=_hint(largest, "give this stage fewer layers") + _others([member]),
        reason="DOES_NOT_FIT",
        param="split",
        rank=rank,
        needed_bytes=needed,
        available_bytes=available,
        headroom_percent=HEADROOM_PERCENT,
        largest_context=largest,
    )


def _hint(largest: int, other: str = "add nodes, or choose a smaller or more quantised model") -> str:
    return f"a context of {largest} tokens fits; or {other}" if largest else other


def _others(members: Sequence[Candidate]) -> str:
    """The hint for members whose memory other rings take."""
    rings = sorted({ring for member in members for ring in member.shares})
    if not rings:
        return ""
    return f"; {', '.join(rings[:_SHOWN])} would leave more with a lower --max-rows or a shorter --context"


def _nodes(count: int) -> str:
    return f"{count} node has" if count == 1 else f"{count} nodes have"
