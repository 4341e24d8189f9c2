"""The shapes that a ring could have, the fastest of them, and their comparison with the plan.

Looked at are pipelines of every number of machines, and tensor rings of 2, 4 and 8 ranks. Which machines, and
how layers go to stages, is decided as the planner decides it (`arrangement.py`, `apportion.py`). The ranks of
a tensor ring are machines whose links are known, if there are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from sealring.coordinator.planning.arrangement import Candidate, deal, preferred_places
from sealring.coordinator.planning.costs import FENCE, Estimate, Model, Shape, estimate
from sealring.coordinator.planning.links import ASSUMED, WORTH, Network
from sealring.coordinator.planning.planner import DEFAULT_MAX_ROWS
from sealring.coordinator.planning.specs import RANKS
from sealring.mesh.ring.limits import JACCL
from sealring.mesh.roster.model import PIPELINE, TENSOR
from sealring.v1 import admin_pb2, model_pb2

_MOST_STAGES = 32
"""The longest pipeline considered: every further stage makes one request slower."""

_SHOWN = 8

Parts = Mapping[int, model_pb2.ModelProfile]
"""Profiles of one rank's part of a model, by number of ranks; at 1 the whole model."""


def shape_table(
    spec: admin_pb2.DeploymentSpec,
    parts: Parts,
    members: Sequence[Candidate],
    network: Network,
    planned: admin_pb2.DeploymentPlan,
) -> admin_pb2.ShapeTable:
    """The fastest shapes of each strategy over these members, strongest first, beside that of the plan, which
    has one ring; `spec` is what the operator asked for."""
    made = planned.spec
    model = Model(parts, made.context, made.kv_bits, made.prefill_chunk, made.speculate)
    rows = spec.max_rows or DEFAULT_MAX_ROWS
    chosen = estimate(model, _shape_of(planned, members), network, rows)
    if chosen is None:
        return admin_pb2.ShapeTable()
    places = preferred_places(spec, list(members))
    shapes = _shapes(model, members, network, places)
    found = [one for shape in shapes if (one := estimate(model, shape, network, rows)) is not None]
    shown = [chosen]
    for strategy in (PIPELINE, TENSOR):
        alike = [one for one in found if one.shape.strategy == strategy]
        for figure in (_one_request, _full_batch):
            best = max(alike, key=figure, default=None)
            if best is not None and all(best.shape != one.shape for one in shown):
                shown.append(best)
    reasons = [*_clear_sums(made, shown, network), *_reasons(shown, members, network)]
    return admin_pb2.ShapeTable(shapes=[_told(one, planned=one is chosen) for one in shown], reasons=reasons)


def _one_request(one: Estimate) -> tuple[float, int]:
    """The order of shapes for one request: on a tie, the fewest machines."""
    return one.one_request, -len(one.memory)


def _full_batch(one: Estimate) -> tuple[float, int]:
    return one.full_batch, -len(one.memory)


def _shape_of(planned: admin_pb2.DeploymentPlan, members: Sequence[Candidate]) -> Shape:
    by_id = {member.id: member for member in members}
    stages = planned.rings[0].stages
    machines = tuple(by_id[stage.member] for stage in stages)
    if planned.spec.strategy == TENSOR:
        return Shape(TENSOR, machines, (planned.profile.layers,) * len(machines))
    return Shape(PIPELINE, machines, tuple(stage.end_layer - stage.first_layer for stage in stages))


def _shapes(
    model: Model, members: Sequence[Candidate], network: Network, places: dict[str, int]
) -> Iterator[Shape]:
    demand = model.demand(1)
    layers = len(demand.weights)
    for count in range(1, min(len(members), layers, _MOST_STAGES) + 1):
        rings = deal(demand, list(members), count, 1, places, network)
        if rings is not None:
            machines, shares = zip(*rings[0], strict=True)
            yield Shape(PIPELINE, machines, shares)
    for ranks in RANKS:
        if ranks <= len(members) and ranks in model.parts:
            yield Shape(TENSOR, _joined(members, network, ranks), (layers,) * ranks)


def _joined(members: Sequence[Candidate], network: Network, ranks: int) -> tuple[Candidate, ...]:
    """The first `ranks` members with known links between all of them; without such, the first ones."""
    for first in members:
        others = [member for member in members if member is not first]
        group = [first]
        for member in sorted(others, key=lambda one: network.between(first.id, one.id).latency):
            known = (frozenset((member.id, other.id)) in network.links for other in group)
            if len(group) < ranks and all(known):
                group.append(member)
        if len(group) == ranks:
            return tuple(group)
    return tuple(members[:ranks])


def _reasons(shown: Sequence[Estimate], members: Sequence[Candidate], network: Network) -> Iterator[str]:
    unknown = sorted(member.name for member in members if member.rate is None)
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        yield (
            f"the speed of {', '.join(unknown[:_SHOWN])}{more} with this model is not known before a part of "
            "it was loaded there"
        )
    timed = [one for one in shown if one.one_request]
    for what, figure in (("one request", _one_request), ("a full batch", _full_batch)):
        yield from _fastest(what, figure, timed, shown[0])
    if network.other is ASSUMED and any(_unknown(one, network) for one in timed):
        yield "assumed of links of which nothing is known: 10 Gbit/s, and 0.1 ms one way"


def _unknown(one: Estimate, network: Network) -> bool:
    """Whether some of the shape's machines have a link of which nothing is known."""
    pairs = (frozenset((each.id, other.id)) for each, other in combinations(one.shape.machines, 2))
    return any(pair not in network.links for pair in pairs)


def _clear_sums(made: admin_pb2.DeploymentSpec, shown: Sequence[Estimate], network: Network) -> Iterator[str]:
    """A warning of a tensor ring of Macs over TCP, which is slower than a pipeline whatever the cable."""
    chosen = shown[0]
    machines = chosen.shape.machines
    macs = any(machine.rate is not None and machine.rate.metal for machine in machines)
    if chosen.shape.strategy != TENSOR or made.backend == JACCL or not macs:
        return
    compute, sums, _ = (1e3 * part for part in chosen.step)
    pipeline = max((one for one in shown if one.shape.strategy == PIPELINE), key=_one_request, default=None)
    other = ""
    if pipeline is not None:
        other = f"; {_words(pipeline)} would bring {pipeline.one_request:.1f} tokens/s, and eight requests "
        other += f"{pipeline.eight:.0f} instead of {chosen.eight:.0f}"
    link = 1e3 * network.slowest(combinations(machines, 2)).latency
    yield (
        f"warning: a tensor ring of Macs over TCP adds up {2 * chosen.shape.layers[0]} times a token, each "
        f"with {1e3 * FENCE:.2f} ms between GPU and CPU and {link:.2f} ms for each message: {sums:.0f} ms "
        f"beside {compute:.0f} ms of computing, {chosen.one_request:.1f} tokens/s{other}"
    )


def _fastest(
    what: str, figure: Callable[[Estimate], tuple[float, int]], timed: Sequence[Estimate], chosen: Estimate
) -> Iterator[str]:
    """What is fastest, how to have it, and where the time of the best of another strategy goes."""
    best = max(timed, key=figure, default=None)
    if best is None:
        return
    planned = figure(chosen)[0]
    if planned * WORTH >= figure(best)[0]:
        yield f"for {what} nothing is faster than the plan, as far as an estimate tells"
    else:
        times = f", {figure(best)[0] / planned:.1f} times the plan" if planned else ""
        yield f"for {what} {_words(best)} would be fastest{times}: {_how(best)}"
    other = max((one for one in timed if one.shape.strategy != best.shape.strategy), key=figure, default=None)
    if other is not None:
        compute, sums, hops = (1e3 * part for part in other.step)
        yield (
            f"{_words(other)} would have {figure(other)[0] / figure(best)[0]:.2f} of that: a step of one row "
            f"computes {compute:.1f} ms, adds up for {sums:.1f} and hands on for {hops:.1f}"
        )


def _words(one: Estimate) -> str:
    count = len(one.memory)
    if one.shape.strategy == TENSOR:
        return f"tensor over {count}"
    return f"a pipeline over {count}" if count > 1 else "one machine"


def _how(one: Estimate) -> str:
    """The options that deploy it."""
    if one.shape.strategy == TENSOR:
        return f"--strategy tensor --stages {len(one.memory)} --clear-links, with sums in clear"
    return f"--stages {len(one.memory)}"


def _told(one: Estimate, *, planned: bool) -> admin_pb2.ShapeEstimate:
    compute, sums, hops = (1e3 * part for part in one.step)
    machines = [
        admin_pb2.ShapeMachine(member=each.id, name=each.name, memory=memory)
        for each, memory in zip(one.shape.machines, one.memory, strict=True)
    ]
    ranks = one.shape.ranks
    return admin_pb2.ShapeEstimate(
        strategy=one.shape.strategy,
        groups=[
            admin_pb2.ShapeGroup(machines=machines[place : place + ranks], layers=layers)
            for place, layers in list(enumerate(one.shape.layers))[::ranks]
        ],
        planned=planned,
        rows=one.rows,
        one_request=one.one_request,
        eight_requests=one.eight,
        full_batch=one.full_batch,
        compute_ms=compute,
        sums_ms=sums,
        hops_ms=hops,
    )
