"""Chooses the layers that members hold. Pure: specification, profile and candidates in, plan or refusal out.

How it chooses, when the operator leaves it open:
- context first: the model's own context if any number of members holds it, else the largest that fits, of
  which windows may take a small part for longer chunks;
- then as few members as hold the weights, and one row at that context, within 90 % of their usable memory;
- members that serve nothing else, where they hold it: every ring more makes the others of a node slower;
- the members that have the model, then those with the most memory (then trust, then id), dealt out so that
  replicas are alike;
- chunks as long as every member gains by, or the largest image is, and has the memory for;
- ranks in the order that the operator gave, else by measured links, else by names, if that fits;
- layers in proportion to the memory that each member has left after embedding or head (`apportion.py`), or to
  speed, if one member was measured at half the speed of another with this model, or less (`speeds.py`);
- another cut for prompts, if it pays by how fast members were measured to prefill (`prompts.py`).

If a head or tail is too small for the embedding, other members are tried at both ends of the ring.
A ring is granted memory for its weights and for as many rows of the whole context as it runs at once, its
tail also for their logits. Plans of other deployments may use what that leaves of a member.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from sealring.coordinator.planning.arrangement import (
    Candidate,
    PlannedRing,
    deal,
    doubled_layers,
    match,
    may_lead,
    preferred_places,
    shortfall,
    snake,
)
from sealring.coordinator.planning.demand import LEAST_CHUNK, Demand, check_profile, longest_chunk_in
from sealring.coordinator.planning.links import Network
from sealring.coordinator.planning.prompts import PromptCut, prompt_cut
from sealring.coordinator.planning.reasons import of_devices, of_members, of_order, reasons
from sealring.coordinator.planning.refusals import (
    does_not_fit,
    no_heads,
    split_does_not_fit,
    too_few_nodes,
    usable,
)
from sealring.coordinator.planning.specs import bad, check_spec
from sealring.mesh.crypto.encoding import canonical_json
from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.names import ring_id
from sealring.mesh.roster.model import TENSOR
from sealring.mesh.units import size
from sealring.v1 import admin_pb2, model_pb2

DEFAULT_CONTEXT = 4096
"""Tokens, for models that name no context of their own."""

CLEAR = "every node computes a part of every layer; what they add up crosses the network in clear"

NO_ENDS = "in pipelines alone, not in a tensor ring"

SHORTEST_CHUNK = 256
"""Tokens of the longest chunk where a member does not say by how many it gains."""

CONTEXT_STEP = 256
_LENT = 16
"""This part of a context that is short of memory is given up for longer chunks."""

DEFAULT_MAX_ROWS = 64

_ROW_SLACK = 512
"""Tokens that a row may take besides its context: caches grow by blocks of 256, and the next one early."""

_RingsAt = Callable[[int], list[PlannedRing] | None]
_Way = tuple[_RingsAt, Callable[[int], ResourceExhausted]]
"""How rings are arranged: by context, with the specification's chunk; and the refusal of the wanted context,
by the largest for which there are rings (0: for none)."""


def plan(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    candidates: Sequence[Candidate],
    network: Network = Network(),
) -> admin_pb2.DeploymentPlan:
    """The rings of a deployment, with every default of the specification filled in.

    `network` has the links between candidates, as far as they are known.

    Raises InvalidInput (BAD_DEPLOYMENT), NotFound (UNKNOWN_NODE), ModelError (BAD_PROFILE,
    KV_BITS_UNSUPPORTED), FailedPrecondition (NOT_ENOUGH_NODES, NODE_NOT_USABLE, NO_DRAFT_MODEL),
    ResourceExhausted
    (DOES_NOT_FIT).
    """
    asked, spec = spec, check_spec(spec)
    check_profile(profile)
    members, end = usable(spec, candidates), "tail" if profile.draft.taps else "head"
    if sum(not member.lacks for member in members) < min(len(members), spec.replicas):
        raise no_heads(spec.draft, members, end)
    _check_shape(spec, profile)
    wanted = spec.context or profile.max_context or DEFAULT_CONTEXT
    rings = _arranged(asked, spec, profile, wanted, members, candidates, network)
    if not all(may_lead(_demand(spec, profile, spec.context), [one for one, _ in ring]) for ring in rings):
        raise no_heads(spec.draft, [ring[-1 if profile.draft.taps else 0][0] for ring in rings], end)
    cuts = _cuts_for_prompts(asked, spec, profile, rings, network)
    rings = [cut.ring if cut else ring for cut, ring in zip(cuts, rings, strict=True)]
    made = _finish(spec, profile, rings, [cut.doubled if cut else doubled_layers(spec) for cut in cuts])
    demand = _demand(made.spec, profile, made.spec.context)
    if spec.strategy == TENSOR:
        made.reasons.append(CLEAR)
        lost = [one for one in profile.residents if one.bytes and not one.guesses]
        made.reasons.extend(f"{one.does} {NO_ENDS}" for one in lost)
    else:
        if profile.not_seeing:
            made.reasons.append(f"prompts with images are refused: {profile.not_seeing}")
        made.reasons.extend(reasons(asked, made.spec, demand, rings, members, wanted, profile.trimmable))
        made.reasons.extend(dict.fromkeys(cut.why(demand) for cut in cuts if cut))
        if not (asked.members or asked.split):
            made.reasons.extend(of_order(rings, preferred_places(spec, members), network))
        if profile.image_tokens > made.spec.prefill_chunk:
            made.reasons.append(_too_large_images(made.spec.prefill_chunk, profile.image_tokens))
    if not asked.max_rows:
        made.reasons.append(_left(made, rings))
    made.reasons.extend(of_members(asked, rings, members))
    made.reasons.extend(of_devices(rings))
    return made


def _too_large_images(chunk: int, tokens: int) -> str:
    return (
        f"images of more than {chunk} tokens are made smaller, and large ones have about {tokens}: an image "
        f"is computed in one chunk of its prompt, which has {chunk} tokens at most"
    )


def _arranged(
    asked: admin_pb2.DeploymentSpec,
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    wanted: int,
    members: list[Candidate],
    candidates: Sequence[Candidate],
    network: Network,
) -> list[PlannedRing]:
    """The rings, with the specification's context, chunk and stages filled in.

    Windowed caches hold a chunk besides, and members with more memory compute longer chunks. So that more
    memory never gives a shorter context, no length of context depends on the chunks that memory allows."""
    if spec.strategy == TENSOR:
        rings_at, refusal = _alike(spec, profile, wanted, members, candidates)
    elif spec.split:
        rings_at, refusal = _by_hand(spec, profile, wanted, members, candidates)
    else:
        rings_at, refusal = _by_memory(spec, profile, wanted, members, candidates, network)
    given, gained = asked.prefill_chunk, [_gained_chunk(spec, profile, one) for one in members]
    spec.prefill_chunk = least = given or min(LEAST_CHUNK, *gained)
    context = largest = _largest_context(wanted, rings_at)
    if not largest or (spec.context and largest < wanted):
        raise refusal(largest)
    if largest < wanted and not given:
        spec.prefill_chunk = max(gained)
        lent = largest // _LENT // CONTEXT_STEP * CONTEXT_STEP
        context = max(_largest_context(largest, rings_at), min(largest, max(DEFAULT_CONTEXT, largest - lent)))
    chunks = [given] if given else _chunks(spec, profile, context, members, least)
    for spec.context, spec.prefill_chunk in [*((context, chunk) for chunk in chunks), (largest, least)]:
        rings = rings_at(spec.context) or []
        chosen = [one for ring in rings for one, _ in ring]
        longest = (given or longest_chunk(spec, profile, spec.context, one) for one in chosen)
        if min(longest, default=0) >= spec.prefill_chunk:
            break
    if not spec.split:
        spec.stages = len(rings[0])
    return rings


def _chunks(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    context: int,
    members: Sequence[Candidate],
    least: int,
) -> list[int]:
    """The chunks to try: the longest of each member, and `least` doubled until that of the strongest."""
    found = {longest_chunk(spec, profile, context, one) for one in members}
    doubled = (least << times for times in range((max(found) // least).bit_length()))
    return sorted(found.union(doubled), reverse=True)


def _cuts_for_prompts(
    asked: admin_pb2.DeploymentSpec,
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    rings: Sequence[PlannedRing],
    network: Network,
) -> list[PromptCut | None]:
    """The cut for each ring's prompts, where that pays and the operator gave no cut."""
    if asked.split or asked.prompt_split or spec.strategy == TENSOR or not profile.travels:
        return [None] * len(rings)
    demand, rows = _demand(spec, profile, spec.context), asked.max_rows or DEFAULT_MAX_ROWS
    given = {"asked": bool(asked.max_rows), "ordered": bool(asked.members)}
    return [prompt_cut(demand, ring, network, rows, **given) for ring in rings]


def _left(made: admin_pb2.DeploymentPlan, rings: Sequence[PlannedRing]) -> str:
    """How many rows there are, and what these leave of the member with least for another deployment."""
    rows = made.spec.max_rows
    rooms = {member.id: member for ring in rings for member, _ in ring}
    stages = [stage for ring in made.rings for stage in ring.stages]
    stage = min(stages, key=lambda one: rooms[one.member].room - memory_of(one))
    left = rooms[stage.member].room - memory_of(stage)
    left_over = f"memory for {rows} sequences of that length at once, which leaves {size(left)} of "
    left_over += f"{stage.member_name} to other deployments"
    few = rows // 4
    taken = stage.kv_budget + stage.logits_bytes
    if not few or 4 * left >= taken:
        return left_over
    return left_over + f"; --max-rows {few} would leave {size(left + taken * (rows - few) // rows)}"


def memory_of(stage: admin_pb2.StagePlan) -> int:
    """Bytes that a planned stage may take of its member."""
    residents = sum(one.bytes for one in stage.residents)
    return stage.weight_bytes + stage.kv_budget + stage.logits_bytes + residents


def _check_shape(spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile) -> None:
    layers, (head, what) = profile.layers, _head_layers(spec, profile)
    if profile.max_context and spec.context > profile.max_context:
        hint = "ask for at most the model's own context, or leave it out to take that"
        raise bad("context", f"context is {spec.context} and the model's own is {profile.max_context}", hint)
    if spec.stages > layers:
        raise bad("stages", f"{spec.stages} stages are more than the model's {layers} layers")
    if spec.stages > layers - max(0, head - 1):
        less = f"{spec.stages} stages leave the head less than the first {head} of {layers} layers"
        hint = f"ask for {layers - head + 1} stages or fewer"
        raise bad("stages", f"{less}, which {what} needs there", hint)
    if spec.split and spec.split[0] < head:
        few = f"split gives the head {spec.split[0]} layers"
        hint = f"give the first stage {head} layers or more"
        raise bad("split", f"{few}, and {what} needs the model's first {head} there", hint)
    if spec.split and sum(spec.split) != layers:
        raise bad("split", f"split adds up to {sum(spec.split)} and the model has {layers} layers")


def _head_layers(spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile) -> tuple[int, str]:
    """The first layers that have to be at the head, and the resident that needs most; 0 if none does."""
    residents = () if spec.strategy == TENSOR else profile.residents
    return max(((one.layers, one.name) for one in residents), default=(0, ""))


def _gained_chunk(spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, member: Candidate) -> int:
    """Tokens of the longest chunk that a member gains by, or that the largest image needs."""
    image = 0 if spec.strategy == TENSOR else profile.image_tokens
    return max(member.longest_chunk or SHORTEST_CHUNK, image)


def longest_chunk(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, context: int, member: Candidate
) -> int:
    """Tokens of the chunk of `_gained_chunk`, or fewer for which a member has the memory."""
    fitting = longest_chunk_in(member.memory_usable, profile, context, spec.kv_bits)
    return min(_gained_chunk(spec, profile, member), fitting)


def _demand(
    spec: admin_pb2.DeploymentSpec, profile: model_pb2.ModelProfile, context: int, slack: int = 0
) -> Demand:
    sizes = context, spec.kv_bits, spec.prefill_chunk, slack, spec.max_rows or 1
    return Demand.of(profile, *sizes, speculate=spec.speculate, whole=spec.strategy == TENSOR)


def _by_memory(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    wanted: int,
    members: list[Candidate],
    candidates: Sequence[Candidate],
    network: Network,
) -> _Way:
    most = min(len(members) // spec.replicas, profile.layers - max(0, _head_layers(spec, profile)[0] - 1))
    counts = [spec.stages] if spec.stages else list(range(1, most + 1))
    if not counts or counts[0] > most:
        raise too_few_nodes(spec, (spec.stages or 1) * spec.replicas, members, candidates)

    places = preferred_places(spec, members)
    known = Network() if spec.members else network  # an operator's order stays

    def attempt(context: int) -> list[PlannedRing] | None:
        demand = _demand(spec, profile, context)
        found = (
            deal(demand, pool, count, spec.replicas, places, known)
            for pool in _pools(spec, members)
            for count in counts
            if count * spec.replicas <= len(pool)
        )
        return next((rings for rings in found if rings is not None), None)

    def refusal(largest: int) -> ResourceExhausted:
        asked = members[: counts[-1] * spec.replicas]
        return does_not_fit(_demand(spec, profile, wanted), wanted, asked, spec.replicas, counts[-1], largest)

    return attempt, refusal


def _pools(spec: admin_pb2.DeploymentSpec, members: list[Candidate]) -> list[list[Candidate]]:
    """Pools of members for rings, to try in turn until one holds the model: members that serve nothing else,
    then all, those with most memory left first."""
    free = [member for member in members if not member.shares]
    if spec.members or len(free) == len(members):
        return [members]
    return [free, sorted(members, key=lambda one: (one.fetches, -one.room, -one.trust, one.id))]


def _by_hand(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    wanted: int,
    members: list[Candidate],
    candidates: Sequence[Candidate],
) -> _Way:
    count = len(spec.split)
    if len(members) < count * spec.replicas:
        raise too_few_nodes(spec, count * spec.replicas, members, candidates)
    places = preferred_places(spec, members)
    pools = [pool for pool in _pools(spec, members) if len(pool) >= count * spec.replicas]

    def rings_of(pool: list[Candidate], demand: Demand) -> list[PlannedRing]:
        if spec.members:
            by_id = {member.id: member for member in members}
            order = [by_id[member] for member in spec.members]
            groups = [order[index * count :][:count] for index in range(spec.replicas)]
        else:
            groups = [
                match(
                    demand,
                    spec.split,
                    doubled_layers(spec),
                    sorted(group, key=lambda member: places[member.id]),
                )
                for group in snake(pool, count, spec.replicas)
            ]
        return [list(zip(group, spec.split, strict=True)) for group in groups]

    def missing(demand: Demand, rings: list[PlannedRing]) -> Iterator[tuple[Candidate, int, int]]:
        return filter(None, (shortfall(demand, ring, doubled_layers(spec)) for ring in rings))

    def rings_at(context: int) -> list[PlannedRing] | None:
        demand = _demand(spec, profile, context)
        tried = (rings_of(pool, demand) for pool in pools)
        return next((rings for rings in tried if not any(missing(demand, rings))), None)

    def refusal(largest: int) -> ResourceExhausted:
        demand = _demand(spec, profile, wanted)
        return split_does_not_fit(*next(missing(demand, rings_of(pools[-1], demand))), wanted, largest)

    return rings_at, refusal


def _alike(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    wanted: int,
    members: list[Candidate],
    candidates: Sequence[Candidate],
) -> _Way:
    """Rings whose members each hold a part of every layer, and all of what is beside the layers; the profile
    is of such a part. A ring is as strong as its weakest: members of like memory are together."""
    count = spec.stages * spec.replicas
    if len(members) < count:
        raise too_few_nodes(spec, count, members, candidates)
    named = {member: place for place, member in enumerate(spec.members)}
    strongest = sorted(members, key=lambda one: (named.get(one.id, 0), -one.room, one.id))
    orders = [strongest]
    if not named:  # the order of `usable`, then by room alone
        free_first = sorted(strongest, key=lambda one: bool(one.shares))
        have_first = sorted(strongest, key=lambda one: (bool(one.shares), one.fetches))
        orders = [have_first, free_first, sorted(strongest, key=lambda one: one.fetches), strongest]
    tried = [order[:count] for order in orders]

    def rings_at(context: int) -> list[PlannedRing] | None:
        needed = _demand(spec, profile, context).total(1)
        chosen = next((one for one in tried if min(member.room for member in one) >= needed), [])
        groups = [chosen[start : start + spec.stages] for start in range(0, len(chosen), spec.stages)]
        return [[(member, profile.layers) for member in group] for group in groups] or None

    def refusal(largest: int) -> ResourceExhausted:
        return does_not_fit(_demand(spec, profile, wanted), wanted, tried[-1], count, 1, largest)

    return rings_at, refusal


def _largest_context(wanted: int, rings_at: _RingsAt) -> int:
    """`wanted`, else the largest multiple of CONTEXT_STEP below it for which there are rings, 0 without."""
    if rings_at(wanted) is not None:
        return wanted
    low, high = 0, (wanted - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if rings_at(middle * CONTEXT_STEP) is not None:
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP


def _finish(
    spec: admin_pb2.DeploymentSpec,
    profile: model_pb2.ModelProfile,
    rings: list[PlannedRing],
    doubled: Sequence[Sequence[int]],
) -> admin_pb2.DeploymentPlan:
    """`doubled`: as in `_ring_plan`, of each ring."""
    demand = _demand(spec, profile, spec.context)
    whole = spec.strategy == TENSOR
    planned = [
        _ring_plan(ring_id(spec.name, index), demand, ring, whole, doubled[index])
        for index, ring in enumerate(rings)
    ]
    rows = (
        (stage.kv_budget - demand.draft_bytes(stage.first_layer, end_held(stage)))
        // max(1, stage.kv_bytes + stage.logits_bytes)
        for ring in planned
        for stage in ring.stages
    )
    spec.max_rows = spec.max_rows or max(1, min(DEFAULT_MAX_ROWS, *rows))
    longest = _demand(spec, profile, spec.context, _ROW_SLACK)
    for planned_ring in planned:
        for stage in planned_ring.stages:
            layers = stage.first_layer, end_held(stage)
            row = longest.row_bytes(*layers) + longest.marks_bytes(*layers)
            most = max(1, spec.max_rows * row) + longest.draft_bytes(*layers)
            stage.logits_bytes *= spec.max_rows
            stage.kv_budget = min(stage.kv_budget - stage.logits_bytes, most)
        planned_ring.kv_budget = min(stage.kv_budget for stage in planned_ring.stages)
    return admin_pb2.DeploymentPlan(
        spec=spec, profile=profile, rings=planned, plan_hash=plan_hash(spec, profile, planned)
    )


def end_held(stage: admin_pb2.StagePlan) -> int:
    """The end of the layers that a planned stage holds from its first on."""
    return stage.prompt_end_layer or stage.end_layer


def _ring_plan(
    name: str, demand: Demand, ring: PlannedRing, whole: bool, doubled: Sequence[int]
) -> admin_pb2.RingPlan:
    """A ring whose stages have as `kv_budget` their member's memory besides weights, and `logits_bytes` of
    one row. `whole`: each of its members has all layers, as far as `demand` goes. `doubled` are the layers
    that each holds beside its own, for prompts alone."""
    stages, first = [], 0
    for rank, (member, layers) in enumerate(ring):
        end = first + layers
        held = end + (doubled[rank] if doubled else 0)
        place = (0, 1) if whole else (rank, len(ring))
        stages.append(
            admin_pb2.StagePlan(
                member=member.id,
                member_name=member.name,
                rank=rank,
                first_layer=first,
                end_layer=end,
                weight_bytes=demand.weight_bytes(first, held, *place),
                kv_bytes=demand.row_bytes(first, held),
                logits_bytes=demand.row_logits(*place),
                residents=demand.residents_at(*place),
                memory_usable=member.memory_usable,
                trust=member.trust,
            )
        )
        if doubled:
            before = doubled[rank - 1] if rank else 0
            stages[-1].prompt_first_layer, stages[-1].prompt_end_layer = first + before, held
        stages[-1].kv_budget = member.room - memory_of(stages[-1]) + stages[-1].logits_bytes
        first = 0 if whole else end
    return admin_pb2.RingPlan(ring=name, stages=stages, min_trust=min(stage.trust for stage in stages))


def with_ring(
    plan: admin_pb2.DeploymentPlan, name: str, ring: admin_pb2.RingPlan
) -> admin_pb2.DeploymentPlan:
    """The plan with another ring in the place of the one of that name."""
    changed = admin_pb2.DeploymentPlan()
    changed.CopyFrom(plan)
    for place in changed.rings:
        if place.ring == name:
            place.CopyFrom(ring)
            place.ring = name
    changed.plan_hash = plan_hash(changed.spec, changed.profile, changed.rings)
    return changed


def _layers_in(stage: admin_pb2.StagePlan) -> list[int]:
    """A stage's layers, and those of its prompts where they are others."""
    own = [stage.first_layer, stage.end_layer]
    return [*own, stage.prompt_first_layer, stage.prompt_end_layer] if stage.prompt_end_layer else own


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
        "kv_bits": spec.kv_bits,
        **({"backend": spec.backend} if spec.backend else {}),
        **({"draft": profile.draft.digest} if spec.draft else {}),
        "rings": [
            {
                "ring": ring.ring,
                "stages": [[stage.member, *_layers_in(stage)] for stage in ring.stages],
            }
            for ring in rings
        ],
    }
    return hashlib.sha256(canonical_json(content)).hexdigest()
