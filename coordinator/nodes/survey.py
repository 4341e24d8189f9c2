"""Surveys the nodes that could serve a model now, and plans over those that are online, free and able."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from sealring.coordinator.auth.standing import Standing
from sealring.coordinator.nodes.links import Links
from sealring.coordinator.nodes.profiles import ProfileReply, Profiles, nobody_has
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import with_draft
from sealring.coordinator.planning.planner import memory_of, plan
from sealring.coordinator.planning.refusals import usable
from sealring.coordinator.planning.shapes import shape_table
from sealring.coordinator.planning.specs import ONE_CUT, RANKS, check_spec
from sealring.coordinator.planning.speeds import Speeds
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.coordinator.streams.sessions import Sessions
from sealring.mesh.errors import Conflict, FailedPrecondition, NotFound
from sealring.mesh.pki.certificates import Role
from sealring.mesh.roster.model import MAX_RINGS_OF_MEMBER, TENSOR
from sealring.mesh.trust.levels import SCORES
from sealring.v1 import admin_pb2, model_pb2
from sealring.v1.membership_pb2 import Heartbeat

_FIRST_BEAT_SECONDS = 5.0
_TRIES = 3


@dataclass(frozen=True)
class _Serves:
    """A ring that a member serves, and the bytes that it may take of it."""

    ring: str
    deployment: str
    memory: int


class Survey:
    """Questions to the nodes, and plans from their replies. The memory of the rings `replacing` counts as
    free."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        profiles: Profiles,
        standing: Standing,
        settings: CoordinatorSettings,
        speeds: Speeds,
        links: Links,
        behind: Callable[[], str] = str,
    ) -> None:
        """`behind` names a machine that cannot read a roster of two cuts; "" where there is none."""
        self._behind = behind
        self._links = links
        self._speeds = speeds
        self._standing = standing
        self._store = store
        self._sessions = sessions
        self._profiles = profiles
        self._settings = settings

    def check(self, spec: admin_pb2.DeploymentSpec) -> admin_pb2.DeploymentSpec:
        """The checked specification; its floor is at least the cluster's. Raises InvalidInput."""
        checked = check_spec(spec)
        checked.trust_floor = max(checked.trust_floor, SCORES[self._settings.trust_floor])
        return checked

    def able(self, deployment: str, replacing: Collection[str]) -> frozenset[str]:
        """The nodes that are online and may serve this deployment."""
        serving = self._serving(replacing)
        members = self._store.members.all(Role.MEMBER)
        return frozenset(member.id for member in members if not self._obstacle(member, deployment, serving))

    async def ask(
        self,
        spec: admin_pb2.DeploymentSpec,
        *,
        replacing: Collection[str] = (),
        expected: Collection[str] = (),
    ) -> dict[str, ProfileReply]:
        """The replies about the model, by node, of all nodes that may serve it. Nodes that are `expected` get
        a moment to connect. Raises NotFound (UNKNOWN_MODEL), Unavailable (NODES_SILENT)."""
        for _ in range(2):
            await self._wait_for_beats(expected)
            members, able = self._store.members.all(Role.MEMBER), self.able(spec.name, replacing)
            named = {one.id: one.name for one in members if not spec.members or one.id in spec.members}
            ids = [one for one in named if one in able]
            ranks = spec.stages if spec.strategy == TENSOR else 0
            answers = await self._profiles.ask(spec.model, ids, ranks, spec.draft, spec.adapter)
            # A coordinator that was stopped learns from its questions which streams have ended meanwhile.
            if not any(answers[one].undecided for one in expected if one in answers):
                break
        if answers and not any(answer.profile for answer in answers.values()):
            raise nobody_has(spec.model, answers.values(), named)
        return answers

    async def plan(
        self,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, ProfileReply],
        *,
        digest: str = "",
        replacing: Collection[str] = (),
        moves: bool = False,
    ) -> admin_pb2.DeploymentPlan:
        """The plan over the members that agree on the model; `digest` says which, else most memory decides.
        A ring that `moves` gets one cut while an older machine is known, whatever was asked for.

        Raises what `sealring.coordinator.planning.planner.plan` raises, Conflict (NODES_CHANGED), and
        FailedPrecondition (INCOMPATIBLE_VERSION) for two cuts while an older machine is known.
        """
        for _ in range(_TRIES):
            profile, candidates = self._candidates(spec, answers, digest, replacing)
            network = self._links.network()
            spec = _with_one_cut(spec, behind, moves) if (behind := self._behind()) else spec
            made = await asyncio.to_thread(
                plan, spec, profile, candidates, network
            )  # seconds for hundreds of nodes
            _, now = self._candidates(spec, answers, digest, replacing)
            room = {member.id: member.room for member in usable(spec, now)}
            if all(
                memory_of(stage) <= room.get(stage.member, -1) for ring in made.rings for stage in ring.stages
            ):
                return made
        raise Conflict(
            "nodes came and went while the plan was made", hint="try again", reason="NODES_CHANGED"
        )

    async def shapes(
        self,
        spec: admin_pb2.DeploymentSpec,
        made: admin_pb2.DeploymentPlan,
        answers: dict[str, ProfileReply],
        *,
        replacing: Collection[str] = (),
    ) -> admin_pb2.ShapeTable:
        """The other shapes that a plan's ring could have over its own nodes and free ones.

        The table is empty for several replicas. One node that has the model profiles its parts for ranks."""
        if len(made.rings) > 1:
            return admin_pb2.ShapeTable()
        _, candidates = self._candidates(spec, answers, made.profile.digest, replacing)
        used = {stage.member for stage in made.rings[0].stages}
        members = [one for one in usable(spec, candidates) if one.id in used or not one.shares]
        own = spec.stages if spec.strategy == TENSOR else 1
        parts, refused = {own: made.profile}, ""
        has = [one for one in answers.values() if one.profile and one.profile.digest == made.profile.digest]
        node = has[0].member
        numbers = [ranks for ranks in (1, *RANKS) if ranks != own and ranks <= len(members)]
        asked = await asyncio.gather(*(self._profiles.ask(spec.model, [node], ranks) for ranks in numbers))
        for ranks, answer in zip(numbers, asked, strict=True):
            found = answer[node]
            if found.profile is not None and found.profile.digest == made.profile.digest:
                parts[ranks] = found.profile
            elif found.error is not None:
                refused = refused or f"no tensor ring of {ranks}: {found.error.message}"
        if 1 not in parts or not used <= {one.id for one in members}:
            return admin_pb2.ShapeTable()
        table = await asyncio.to_thread(shape_table, spec, parts, members, self._links.network(), made)
        table.reasons.extend([refused] if refused else [])
        return table

    def _candidates(
        self,
        spec: admin_pb2.DeploymentSpec,
        answers: dict[str, ProfileReply],
        digest: str,
        replacing: Collection[str],
    ) -> tuple[model_pb2.ModelProfile, list[Candidate]]:
        beats = defaultdict(Heartbeat, {one.member: one.heartbeat for one in self._sessions if one.heartbeat})
        memory = {member: beat.memory_usable for member, beat in beats.items()}
        groups: dict[str, dict[str, model_pb2.ModelProfile]] = defaultdict(dict)
        for answer in answers.values():
            if answer.profile is not None:
                groups[answer.profile.digest][answer.member] = answer.profile
        weight = {one: sum(memory.get(member, 0) for member in groups[one]) for one in groups}
        digest = digest or max(weight, key=lambda one: (weight[one], one), default="")
        agreeing = _of_one_commit(groups.get(digest, {}), memory)
        draft = _draft(spec, agreeing, memory)
        serving = self._serving(replacing)
        candidates = [
            Candidate(
                member.id,
                member.name,
                memory.get(member.id, 0),
                self._standing.trust(member),
                self._obstacle(member, spec.name, serving) or _model_obstacle(member.id, agreeing, answers),
                fetches=member.id not in agreeing,
                rate=self._speeds.of(member.id, digest, beats[member.id].computes_on),
                longest_chunk=beats[member.id].longest_chunk,
                computes_on=beats[member.id].computes_on,
                shares=tuple(one.ring for one in serving.get(member.id, ())),
                taken=sum(
                    one.memory + beats[member.id].memory_overhead for one in serving.get(member.id, ())
                ),
                lacks=_lacks(member.id, spec.draft, draft, agreeing),
            )
            for member in self._store.members.all(Role.MEMBER)
        ]
        usable(spec, candidates)  # raises if no node agrees
        # Files that nodes lack are fetched at that commit, and compared by their hashes if these are known.
        known = max(agreeing.values(), key=lambda one: (bool(one.hub_files), bool(one.commit)))
        made = _with_residents(known, agreeing.values())
        if draft is not None:
            with_draft(made, spec.draft, draft)
        return made, candidates

    def _obstacle(self, member: StoredMember, deployment: str, serving: Mapping[str, list[_Serves]]) -> str:
        session = self._sessions.find(member.id)
        if session is None:
            return "it is offline"
        if member.draining:
            return "it is draining"
        rings = serving.get(member.id, [])
        own = next((one.ring for one in rings if one.deployment == deployment), "")
        if own:
            return f"it serves ring {own} of this deployment"
        if len(rings) >= MAX_RINGS_OF_MEMBER:
            return f"it serves {len(rings)} rings, which is the most"
        if session.heartbeat is None:
            return "it has not reported its memory yet"
        return self._standing.refusal(member)

    def _serving(self, replacing: Collection[str]) -> dict[str, list[_Serves]]:
        """The rings that members serve, by the ids of the members."""
        found: dict[str, list[_Serves]] = defaultdict(list)
        for deployment in self._store.deployments.all():
            for ring in deployment.plan.rings:
                for stage in ring.stages:
                    if ring.ring not in replacing:
                        found[stage.member].append(
                            _Serves(ring.ring, deployment.plan.spec.name, memory_of(stage))
                        )
        return dict(found)

    async def _wait_for_beats(self, expected: Collection[str]) -> None:
        """Gives nodes that are expected, or connected a moment ago, the time to report their memory."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_BEAT_SECONDS):
                while any(one.heartbeat is None for one in self._sessions) or any(
                    self._sessions.find(one) is None for one in expected
                ):
                    await self._sessions.next_beat()


def _with_one_cut(spec: admin_pb2.DeploymentSpec, behind: str, moves: bool) -> admin_pb2.DeploymentSpec:
    if any(spec.prompt_split) and not moves:
        raise FailedPrecondition(
            f"{behind} runs an older release, which reads no roster of a ring whose prompts have another cut",
            hint=f"update {behind}, or leave --prompt-split out",
            reason="INCOMPATIBLE_VERSION",
            param="prompt_split",
        )
    made = deepcopy(spec)
    made.prompt_split[:] = ONE_CUT
    return made


def _draft(
    spec: admin_pb2.DeploymentSpec,
    agreeing: Mapping[str, model_pb2.ModelProfile],
    memory: Mapping[str, int],
) -> model_pb2.ModelProfile | None:
    """The profile of the draft model that most memory has; None if the deployment asks for none.

    Raises NotFound (UNKNOWN_MODEL) if no node has it. The metadata `fetchable` says that the member `node`
    would fetch it.
    """
    if not spec.draft:
        return None
    having = {member: one.draft for member, one in agreeing.items() if one.HasField("draft")}
    if not having and agreeing:
        fetching = [member for member, one in agreeing.items() if one.fetches_draft and "/" in spec.draft]
        node = max(fetching, key=lambda member: (memory.get(member, 0), member), default="")
        raise NotFound(
            f"no node that has {spec.model} has the draft model {spec.draft}",
            hint=f"fetch it to one of these: sealring model pull {spec.draft} --node NODE",
            reason="UNKNOWN_MODEL",
            param="draft",
            node=node,
            fetchable="yes" if node else "",
        )
    weight = Counter[str]()
    for member, one in having.items():
        weight[one.digest] += memory.get(member, 0)
    return max(having.values(), key=lambda one: (weight[one.digest], one.digest, one.hub_files), default=None)


def _lacks(
    member: str,
    name: str,
    draft: model_pb2.ModelProfile | None,
    agreeing: Mapping[str, model_pb2.ModelProfile],
) -> frozenset[str]:
    """The draft model, if a member neither has it nor would fetch it."""
    own = agreeing.get(member)
    if draft is None or own is None or own.fetches_draft:
        return frozenset()
    return frozenset() if own.HasField("draft") and own.draft.digest == draft.digest else frozenset({name})


def _with_residents(
    profile: model_pb2.ModelProfile, agreeing: Iterable[model_pb2.ModelProfile]
) -> model_pb2.ModelProfile:
    """A profile of our own without a draft model, with the residents of the node that reports most: what can
    compute them is not installed on every node."""
    most = max(agreeing, key=lambda one: sum(each.bytes for each in one.residents), default=profile)
    made = deepcopy(profile)
    made.ClearField("draft")
    made.ClearField("residents")
    made.residents.extend(most.residents)
    made.image_tokens, made.not_seeing = most.image_tokens, most.not_seeing
    return made


def _of_one_commit(
    agreeing: Mapping[str, model_pb2.ModelProfile], memory: Mapping[str, int]
) -> dict[str, model_pb2.ModelProfile]:
    """The members at the commit that holds most memory, at another with the same files, or at an unknown one.

    Files of two commits may have the same digest and other weights. If members state different files for one
    commit, one of them could pass two commits off as the same: then no statement about files counts."""
    files_of = defaultdict[str, set[str]](set)
    for one in agreeing.values():
        files_of[one.commit] |= {one.hub_files} - {""}
    if any(len(files) > 1 for files in files_of.values()):
        agreeing = {member: _without_files(one) for member, one in agreeing.items()}
        files_of.clear()
    version = {
        member: min(files_of.get(one.commit, ()), default=one.commit) for member, one in agreeing.items()
    }
    weight = Counter[str]()
    for member in agreeing:
        weight[version[member]] += memory.get(member, 0) if version[member] else 0
    most = max(weight, key=lambda one: (weight[one], one), default="")
    return {member: profile for member, profile in agreeing.items() if version[member] in ("", most)}


def _without_files(profile: model_pb2.ModelProfile) -> model_pb2.ModelProfile:
    bare = deepcopy(profile)
    bare.hub_files = ""
    return bare


def _model_obstacle(member: str, agreeing: Collection[str], answers: dict[str, ProfileReply]) -> str:
    if member in agreeing:
        return ""
    answer = answers.get(member)
    if answer is None:
        return "it was not asked for the model"
    if answer.would_fetch:
        return ""
    if answer.profile is not None:
        return "it has another version of the model"
    return answer.error.message if answer.error else "it does not have the model"
