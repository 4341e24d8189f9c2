"""The nodes that could serve a model, and plans that hold while nodes come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sealring.coordinator.nodes import survey
from sealring.coordinator.nodes.links import Links
from sealring.coordinator.nodes.profiles import ProfileReply
from sealring.coordinator.nodes.survey import Survey
from sealring.coordinator.planning.demand import capacity
from sealring.coordinator.planning.planner import memory_of
from sealring.coordinator.planning.speeds import Speeds
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import Conflict, FailedPrecondition, NotFound, Unavailable
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import admin_pb2
from sealring.v1.membership_pb2 import Heartbeat
from tests.coordinator.conftest import small_profile

GIB = 1 << 30
MIB = 1 << 20
IDS = [encode_base32(bytes([number]) * 32) for number in range(4)]
SPEC = admin_pb2.DeploymentSpec(name="demo", model="demo", trust_floor=10)


def member(number: int, *, draining: bool = False) -> Any:
    return SimpleNamespace(id=IDS[number], name=f"node-{number}", draining=draining)


def session(number: int, memory: int = GIB, overhead: int = 0, longest_chunk: int = 0) -> Any:
    said = Heartbeat(memory_usable=memory, memory_overhead=overhead, longest_chunk=longest_chunk)
    return SimpleNamespace(member=IDS[number], heartbeat=said if memory else None)


class Sessions(list[Any]):
    def find(self, member: str) -> Any:
        return next((one for one in self if one.member == member), None)

    waits = 0

    async def next_beat(self) -> None:
        self.waits += 1
        raise TimeoutError


def answer(number: int, digest: str = "ab" * 32) -> dict[str, ProfileReply]:
    return {IDS[number]: ProfileReply(IDS[number], small_profile(digest), None)}


def failed(number: int) -> dict[str, ProfileReply]:
    return {IDS[number]: ProfileReply(IDS[number], None, Unavailable("away"))}


def deployed(*stages: int, name: str = "other", memory: int = MIB) -> Any:
    ring = admin_pb2.RingPlan(
        ring=f"{name}-0",
        stages=[
            admin_pb2.StagePlan(member=IDS[one], weight_bytes=memory // 2, kv_budget=memory // 2)
            for one in stages
        ],
    )
    return SimpleNamespace(plan=admin_pb2.DeploymentPlan(spec={"name": name}, rings=[ring]))


def make(
    members: list[Any],
    sessions: list[Any],
    *,
    deployments: tuple[Any, ...] = (),
    floor: int = 10,
    behind: Any = str,
) -> Any:
    here = Sessions(sessions)
    profiles: Any = SimpleNamespace()
    made: Any = Survey(
        SimpleNamespace(  # type: ignore[arg-type]
            members=SimpleNamespace(all=lambda role: members),
            deployments=SimpleNamespace(all=lambda: deployments),
        ),
        here,  # type: ignore[arg-type]
        profiles,
        SimpleNamespace(trust=lambda member: 10, refusal=lambda member: ""),  # type: ignore[arg-type]
        SimpleNamespace(trust_floor=floor),  # type: ignore[arg-type]
        Speeds(),
        Links(clock=lambda: 0.0),
        behind,
    )
    asked: list[list[str]] = []

    async def ask(model: str, members: list[str], ranks: int, *_: str) -> dict[str, ProfileReply]:
        asked.append(members)
        made.ranks = ranks
        return made.answers

    profiles.ask = ask
    made.sessions, made.profiles = here, profiles
    made.asked, made.answers = asked, {}
    return made


def test_the_clusters_floor_is_the_lowest() -> None:
    made = make([], [], floor=TrustLevel.SELF_SIGNED)
    for asked, floor in ((0, 20), (19, 20), (21, 21)):
        spec = admin_pb2.DeploymentSpec(name="demo", model="demo", trust_floor=asked)
        assert made.check(spec).trust_floor == floor


async def test_only_who_is_here_and_may_serve_it_is_asked() -> None:
    """Not who serves the same deployment, nor who serves many."""
    members = [member(0), member(1, draining=True), member(2), member(3)]
    rings = (deployed(2), deployed(2, name="demo"))
    made = make(members, [session(0), session(1), session(2)], deployments=rings)
    assert await made.ask(SPEC) == {}
    await made.ask(SPEC, replacing=("demo-0",))
    await made.ask(admin_pb2.DeploymentSpec(model="demo", members=[IDS[2]]))
    assert made.asked == [[IDS[0]], [IDS[0], IDS[2]], [IDS[2]]]
    assert made.able("more", ()) == {IDS[0], IDS[2]}
    many = make(members, [session(2)], deployments=tuple(deployed(2, name=f"n{one}") for one in range(8)))
    assert many.able("more", ()) == set()
    assert many.able("more", ("n3-0",)) == {IDS[2]}


async def test_what_other_rings_take_of_a_node_is_not_planned_again() -> None:
    made = make([member(0)], [session(0)], deployments=(deployed(0, memory=GIB // 2),))
    alone = (await make([member(0)], [session(0)]).plan(SPEC, answer(0))).rings[0].stages[0]
    beside = await made.plan(SPEC, answer(0))
    (stage,) = beside.rings[0].stages
    assert stage == alone
    assert [one for one in beside.reasons if "other-0" in one] == [
        "node-0 also serves other-0, and has 409.6 MiB left: no node is free"
    ]
    assert (await made.plan(SPEC, answer(0), replacing=("other-0",))).rings[0].stages[0] == alone
    left = memory_of(alone) - MIB
    nearly = deployed(0, memory=capacity(GIB) - left)
    tight = (await make([member(0)], [session(0)], deployments=(nearly,)).plan(SPEC, answer(0))).rings[0]
    assert memory_of(tight.stages[0]) == left
    roomy = [session(0, overhead=300 * MIB)]
    assert (await make([member(0)], roomy).plan(SPEC, answer(0))).rings[0].stages[0] == alone
    third = make([member(0)], roomy, deployments=(deployed(0), deployed(0, name="more")))
    (told,) = (await third.plan(SPEC, answer(0))).reasons[-1:]
    assert "has 319.6 MiB left" in told, "each engine more takes something beside its plan"
    full = make([member(0)], [session(0)], deployments=(deployed(0, memory=GIB),))
    with pytest.raises(FailedPrecondition, match="other-0 may take all of its memory"):
        await full.plan(SPEC, answer(0))


@pytest.mark.parametrize(("strategy", "ranks"), [("", 0), ("pipeline", 0), ("tensor", 4)])
async def test_ranks_are_asked_for_where_layers_are_cut(strategy: str, ranks: int) -> None:
    made = make([member(0)], [session(0)])
    await made.ask(admin_pb2.DeploymentSpec(name="demo", model="demo", strategy=strategy, stages=4))
    assert made.ranks == ranks


async def test_who_has_not_told_its_memory_is_waited_for_and_then_left_out() -> None:
    made = make([member(0), member(1)], [session(0), session(1, memory=0)])
    await made.ask(SPEC)
    assert (made.asked, made.sessions.waits) == ([[IDS[0]]], 1)
    told = make([member(0)], [session(0)])
    await told.ask(SPEC)
    assert told.sessions.waits == 0


async def test_members_of_a_ring_that_moves_have_a_moment_to_come_back() -> None:
    """A coordinator that was stopped learns at its first question which streams have ended meanwhile."""
    made = make([member(0), member(1)], [session(0)])

    async def comes() -> None:
        made.sessions.append(session(1))

    made.sessions.next_beat = comes
    await made.ask(SPEC)
    await made.ask(SPEC, expected={IDS[1]})
    assert made.asked == [[IDS[0]], [IDS[0], IDS[1]]]
    made.answers = answer(0) | failed(1)
    await made.ask(SPEC)
    await made.ask(SPEC, expected={IDS[0]})
    assert len(made.asked) == 4
    await made.ask(SPEC, expected={IDS[1]})
    assert len(made.asked) == 6, "who is expected and did not answer is asked twice, and no more"


async def test_a_model_that_nobody_has_is_unknown_once_all_have_said_so() -> None:
    made = make([member(0), member(1)], [session(0), session(1)])
    made.answers = {IDS[1]: ProfileReply(IDS[1], None, NotFound("it is not here"))}
    with pytest.raises(NotFound):
        await made.ask(SPEC)
    made.answers |= failed(0)
    with pytest.raises(Unavailable):
        await made.ask(SPEC)
    made.answers = failed(0) | answer(1)
    assert await made.ask(SPEC) == made.answers


async def test_the_version_of_the_model_with_most_memory_is_served_unless_one_is_named() -> None:
    members = [member(number) for number in range(3)]
    made = make(members, [session(0), session(1), session(2, memory=3 * GIB)])
    answers = answer(0) | answer(1) | answer(2, "cd" * 32)
    assert (await made.plan(SPEC, answers)).profile.digest == "cd" * 32
    assert (await made.plan(SPEC, answers, digest="ab" * 32)).profile.digest == "ab" * 32


async def test_no_ring_has_a_model_of_two_commits() -> None:
    """Weights may differ under one digest; a node that knows no commit is not left out."""
    made = make([member(number) for number in range(3)], [session(0), session(1, 2 * GIB), session(2)])
    answers = answer(0) | answer(1) | answer(2)
    for number, letter in enumerate("cd"):
        answers[IDS[number]].profile.commit = letter * 40
    planned = await made.plan(admin_pb2.DeploymentSpec(name="demo", model="demo", stages=2), answers)
    assert planned.profile.commit == "d" * 40
    assert {stage.member for stage in planned.rings[0].stages} == {IDS[1], IDS[2]}


async def test_a_node_with_the_model_profiles_the_parts_of_ranks() -> None:
    """Also if the plan's first node still lacks it, and not one with another version; a refusal is shown."""
    made = make([member(0), member(1), member(2)], [session(0, 2 * GIB), session(1), session(2, MIB)])
    lacks = NotFound("no model", reason="MODEL_NOT_FOUND", fetchable="yes")
    answers = answer(2, "cd" * 32) | {IDS[0]: ProfileReply(IDS[0], None, lacks)} | answer(1)
    asked: list[tuple[str, int]] = []

    async def ask(model: str, members: list[str], ranks: int, *_: str) -> dict[str, ProfileReply]:
        asked.append((members[0], ranks))
        return {members[0]: ProfileReply(members[0], None, Unavailable("3 heads are not for 2 ranks"))}

    made.profiles.ask = ask
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", members=IDS[:2], stages=2, trust_floor=10)
    planned = await made.plan(spec, answers)
    table = await made.shapes(spec, planned, answers)
    assert asked == [(IDS[1], 2)]
    assert {one.strategy for one in table.shapes} == {"pipeline"}
    assert "no tensor ring of 2: 3 heads are not for 2 ranks" in table.reasons


@pytest.mark.parametrize("gone", [False, True])
async def test_a_plan_that_cannot_be_compared_has_no_table(gone: bool) -> None:
    """Nobody says how one node would hold the model, or a node of the plan has left."""
    made = make([member(0), member(1)], [session(0), session(1)])
    answers = answer(0) | answer(1)
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", stages=2, trust_floor=10)
    if not gone:
        spec.strategy, spec.clear_links = "tensor", True
    planned = await made.plan(spec, answers)
    made.answers = failed(0)
    if gone:
        made.sessions.pop()
    assert await made.shapes(spec, planned, answers) == admin_pb2.ShapeTable()


async def test_commits_with_the_same_files_are_one_model() -> None:
    """One member's statement of a commit's files holds for others at that commit that state none."""
    made = make([member(number) for number in range(4)], [session(number) for number in range(4)])
    answers = answer(0) | answer(1) | answer(2) | answer(3)
    for number, (letter, files) in enumerate([("c", "1"), ("d", "1"), ("c", ""), ("e", "2")]):
        profile = answers[IDS[number]].profile
        profile.commit, profile.hub_files = letter * 40, files * 64
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", stages=3)
    planned = await made.plan(spec, answers)
    assert {stage.member for stage in planned.rings[0].stages} == set(IDS[:3])
    assert planned.profile.hub_files == "1" * 64
    assert planned.profile.commit in ("c" * 40, "d" * 40)
    with pytest.raises(FailedPrecondition, match="another version of the model"):
        await made.plan(admin_pb2.DeploymentSpec(name="demo", model="demo", stages=4), answers)


@pytest.mark.parametrize("other", ["1", "2"])
async def test_a_node_does_not_make_two_commits_pass_for_the_same(other: str) -> None:
    """One tells the files of another commit as those of its own: files are not looked at any more."""
    made = make([member(number) for number in range(3)], [session(number) for number in range(3)])
    answers = answer(0) | answer(1) | answer(2)
    for number, (letter, files) in enumerate([("c", "2"), ("c", "1"), ("d", other)]):
        profile = answers[IDS[number]].profile
        profile.commit, profile.hub_files = letter * 40, files * 64
    planned = await made.plan(admin_pb2.DeploymentSpec(name="demo", model="demo", stages=2), answers)
    assert {stage.member for stage in planned.rings[0].stages} == set(IDS[:2])
    assert (planned.profile.commit, planned.profile.hub_files) == ("c" * 40, "")
    with pytest.raises(FailedPrecondition, match="another version of the model"):
        await made.plan(admin_pb2.DeploymentSpec(name="demo", model="demo", stages=3), answers)


@pytest.mark.parametrize(
    ("answers", "named", "why"),
    [
        (answer(1), 0, "it was not asked for the model"),
        (answer(1) | answer(0, "00" * 32), 0, "it has another version of the model"),
        (answer(1) | failed(0), 0, "away"),
        (answer(1) | {IDS[0]: ProfileReply(IDS[0], None, None)}, 0, "it does not have the model"),
        (answer(0), 1, "it has not reported its memory yet"),
        (answer(0), 2, "it is draining"),
        (answer(0), 3, "it is offline"),
    ],
)
async def test_why_a_node_cannot_serve_is_told(
    answers: dict[str, ProfileReply], named: int, why: str
) -> None:
    members = [member(0), member(1), member(2, draining=True), member(3)]
    made = make(members, [session(0), session(1, 2 * GIB if named == 0 else 0), session(2)])
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", members=[IDS[named]])
    with pytest.raises(FailedPrecondition) as caught:
        await made.plan(spec, answers)
    assert caught.value.message.endswith(why)


@pytest.mark.parametrize("answers", [{}, answer(1)])
async def test_nothing_is_planned_where_nobody_has_the_model(answers: dict[str, ProfileReply]) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await make([member(0)], [session(0)]).plan(SPEC, answers)
    assert caught.value.reason == "NOT_ENOUGH_NODES"


@pytest.mark.parametrize("always", [False, True])
async def test_a_plan_over_who_has_gone_meanwhile_is_made_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    made = make([member(0), member(1)], [session(0, 2 * GIB), session(1)])
    real, plans = survey.plan, []

    def leaving(*args: Any) -> Any:
        plans.append(real(*args))
        gone = plans[-1].rings[0].stages[0].member
        if always or len(plans) == 1:
            made.sessions[:] = [session(number) for number in (0, 1) if IDS[number] != gone]
        return plans[-1]

    monkeypatch.setattr(survey, "plan", leaving)
    if not always:
        assert await made.plan(SPEC, answer(0) | answer(1)) == plans[-1]
        assert [one.rings[0].stages[0].member for one in plans] == IDS[:2]
        return
    with pytest.raises(Conflict) as caught:
        await made.plan(SPEC, answer(0) | answer(1))
    assert (caught.value.reason, len(plans)) == ("NODES_CHANGED", 3)


def drafting(number: int, digest: str = "", *, fetches: bool = False) -> dict[str, ProfileReply]:
    """The reply of a node that has a draft model with this digest, or none."""
    profile = small_profile("ab" * 32)
    profile.fetches_draft, profile.trimmable = fetches, True
    if digest:
        profile.draft.CopyFrom(small_profile(digest))
    return {IDS[number]: ProfileReply(IDS[number], profile, None)}


async def test_a_ring_begins_at_a_node_with_the_draft_model() -> None:
    """The version with most memory counts."""
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", draft="small", stages=2, speculate=True)
    made = make([member(one) for one in range(3)], [session(one, 2 * GIB) for one in range(3)])
    replies = drafting(0) | drafting(1, "cd" * 32)
    planned = await made.plan(spec, replies)
    head, tail = planned.rings[0].stages
    assert (head.member, tail.member) == (IDS[1], IDS[0])
    assert [[one.model for one in stage.residents] for stage in (head, tail)] == [["small"], []]
    assert planned.profile.draft.digest == "cd" * 32
    assert any("small guesses at" in reason for reason in planned.reasons)
    replies = drafting(0, fetches=True) | drafting(1, "cd" * 32)
    assert (await made.plan(spec, replies)).rings[0].stages[0].member in (IDS[0], IDS[1])
    with pytest.raises(NotFound) as caught:
        await made.plan(spec, drafting(0) | drafting(1))
    assert "draft model small" in caught.value.message
    assert "model pull small" in caught.value.hint
    assert not caught.value.metadata["fetchable"]
    other = admin_pb2.DeploymentSpec(name="demo", model="demo", draft="org/small", stages=2, speculate=True)
    with pytest.raises(NotFound) as caught:
        await made.plan(other, drafting(0) | drafting(1, fetches=True))
    assert (caught.value.metadata["fetchable"], caught.value.metadata["node"]) == ("yes", IDS[1])
    spec.members.extend([IDS[0], IDS[1]])
    spec.split.extend([1, small_profile("ab" * 32).layers - 1])
    spec.stages = 0
    with pytest.raises(FailedPrecondition) as refused:
        await made.plan(spec, drafting(0) | drafting(1, "cd" * 32))
    assert refused.value.reason == "NO_DRAFT_MODEL"


@pytest.mark.parametrize(("asked", "left"), [([], [0]), ([0], [0])])
async def test_while_an_older_machine_is_there_prompts_get_no_cut_of_their_own(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], left: list[int]
) -> None:
    """It could not read the roster."""
    seen: list[list[int]] = []

    def planned(spec: Any, *_: Any) -> Any:
        seen.append(list(spec.prompt_split))
        return admin_pb2.DeploymentPlan()

    monkeypatch.setattr(survey, "plan", planned)
    behind = [""]
    made = make([member(0)], [session(0)], behind=lambda: behind[0])
    spec = admin_pb2.DeploymentSpec(name="demo", model="demo", prompt_split=asked)
    await made.plan(spec, answer(0))
    behind[0] = "node old"
    await made.plan(spec, answer(0))
    assert seen == [asked, left]
    spec.split[:], spec.prompt_split[:] = [1, 2], [2, 1]
    with pytest.raises(FailedPrecondition, match="node old") as caught:
        await made.plan(spec, answer(0))
    assert caught.value.reason == "INCOMPATIBLE_VERSION"
    await made.plan(spec, answer(0), moves=True)
    assert seen[-1] == [0], "a ring that moves serves with one cut rather than not at all"
