"""Admin calls end to end, and the callers that may make them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
import storekit

from sealring.coordinator.admin.service import AdminService
from sealring.coordinator.members.tokens import MAX_OPEN_TOKENS
from sealring.coordinator.nodes.profiles import ProfileReply, nobody_has
from sealring.coordinator.planning.planner import memory_of
from sealring.coordinator.store import OperatorRole
from sealring.mesh.audit import verify_chain
from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import (
    AlreadyExists,
    InvalidInput,
    ModelError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
    Unavailable,
)
from sealring.mesh.member import JoinToken, load_machine_state
from sealring.mesh.pki import Role, decode_chain, verify_root_chain
from sealring.mesh.roster import check_roster
from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import admin_pb2, admin_pb2_grpc, membership_pb2, membership_pb2_grpc
from tests.coordinator.conftest import GIB, Cluster, channel_to, small_profile


async def audit(cluster: Cluster) -> list[admin_pb2.AuditEntry]:
    answer = await cluster.call("ListAuditLog", admin_pb2.ListAuditLogRequest())
    verify_chain(answer.entries)
    return list(answer.entries)


def create(**spec: Any) -> admin_pb2.CreateDeploymentRequest:
    return admin_pb2.CreateDeploymentRequest(
        spec=admin_pb2.DeploymentSpec(**({"name": "demo", "model": "demo"} | spec))
    )


async def test_join_tokens_are_made_listed_and_revoked(cluster: Cluster) -> None:
    made = await cluster.call(
        "CreateJoinToken", admin_pb2.CreateJoinTokenRequest(role=membership_pb2.ROLE_NODE, note="attic")
    )
    assert JoinToken.parse(made.token).addresses == (cluster.join_address,)
    listed = (await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())).tokens
    assert [(token.token_id, token.note) for token in listed] == [(made.token_id, "attic")]
    assert listed[0].expires - listed[0].created == 600
    secret = made.token.split(".")[3]
    assert secret not in str(listed)
    await cluster.call("RevokeJoinToken", admin_pb2.RevokeJoinTokenRequest(token_id=made.token_id))
    assert not (await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())).tokens
    with pytest.raises(PermissionDenied):
        await cluster.join("alpha", token=made.token)
    with pytest.raises(NotFound):
        await cluster.call("RevokeJoinToken", admin_pb2.RevokeJoinTokenRequest(token_id=made.token_id))
    assert [entry.action for entry in await audit(cluster)] == [
        "create_cluster",
        "create_join_token",
        "revoke_join_token",
    ]
    assert all(secret not in str(entry) for entry in await audit(cluster))


async def test_what_a_join_token_may_be(cluster: Cluster) -> None:
    for fields, reason in (
        ({"role": 0}, "BAD_ROLE"),
        ({"ttl_seconds": 3601}, "BAD_TTL"),
        ({"note": "n" * 201}, "BAD_NOTE"),
        ({"note": "a\nb"}, "BAD_NOTE"),
        ({"uses": 65}, "BAD_USES"),
        ({}, ""),
        ({"ttl_seconds": 3600, "uses": 64, "note": "n" * 200}, ""),
    ):
        request = admin_pb2.CreateJoinTokenRequest(**({"role": membership_pb2.ROLE_NODE} | fields))
        if not reason:
            await cluster.call("CreateJoinToken", request)
            continue
        with pytest.raises(InvalidInput) as caught:
            await cluster.call("CreateJoinToken", request)
        assert (caught.value.reason, caught.value.metadata["param"] in fields) == (reason, True)
    listed = (await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())).tokens
    found = {(one.expires - one.created, one.uses, one.note) for one in listed}
    assert found == {(600, 1, ""), (3600, 64, "n" * 200)}


async def test_the_audit_log_is_read_in_parts(cluster: Cluster) -> None:
    for number in range(101):
        cluster.coordinator.store.audit.append(1, "test", "note", str(number), {})
    for request, count in (
        ({}, 100),
        ({"limit": 1000}, 102),
        ({"limit": 2}, 2),
        ({"limit": 2, "newest": True}, 2),
        ({"after": (1 << 63) - 1}, 0),
    ):
        answer = await cluster.call("ListAuditLog", admin_pb2.ListAuditLogRequest(**request))
        assert len(answer.entries) == count
        if "newest" in request:
            assert answer.entries[-1].subject == "100"


async def test_a_node_that_drains_already_drains_on_and_a_gateway_never_does(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    gate = await cluster.join("gate", role=Role.GATEWAY)
    for undo, state in (
        (True, admin_pb2.NODE_STATE_ONLINE),
        (False, admin_pb2.NODE_STATE_DRAINING),
        (False, admin_pb2.NODE_STATE_DRAINING),
    ):
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=node.id, undo=undo))
        (listed,) = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).nodes
        assert listed.state == state
    assert [one.action for one in await audit(cluster)].count("drain_node") == 1
    assert "undo_drain_node" not in [one.action for one in await audit(cluster)]
    with pytest.raises(InvalidInput) as caught:
        await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=gate.state.peer.id))
    assert caught.value.reason == "NOT_A_NODE"


async def test_two_nodes_that_come_are_asked_for_their_link_and_it_is_listed(cluster: Cluster) -> None:
    nodes = [await cluster.node(name, measures=True) for name in ("alpha", "beta")]
    await cluster.node("old")
    caller, called = sorted(nodes, key=lambda one: one.id)
    question = await caller.wait_for("measure")
    assert question.member == called.id
    way = membership_pb2.MeasuredWay(address="10.0.0.2:9", round_trip_us=300, bytes_per_second=10**8)
    await caller.send(measured=membership_pb2.MeasureAnswer(id=question.id, way=way))

    async def links() -> list[admin_pb2.NodeLink]:
        return list((await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).links)

    while not (found := await links()):
        await asyncio.sleep(0.01)
    (link,) = found
    assert (link.caller, link.called, link.host) == (caller.id, called.id, "10.0.0.2")
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=called.id))
    assert await links() == []


async def test_nodes_are_listed_with_what_they_report(cluster: Cluster) -> None:
    node = await cluster.node("alpha", memory=3 << 30)
    await cluster.join("beta")
    await cluster.call("CreateDeployment", create())
    answer = await cluster.call("ListNodes", admin_pb2.ListNodesRequest())
    by_name = {found.name: found for found in answer.nodes}
    alpha, beta = by_name["alpha"], by_name["beta"]
    assert (alpha.id, alpha.level, alpha.trust) == (node.id, "software", 10)
    beat = alpha.heartbeat
    assert (beat.memory_usable, beat.memory_total, beat.load) == (3 << 30, 6 << 30, 0.5)
    (place,) = alpha.rings
    assert (place.ring, place.rank, place.first_layer, place.end_layer) == ("demo-0", 0, 0, 9)
    assert (beat.memory_overhead, beat.on_battery, beat.low_power) == (1, True, True)
    assert alpha.memory_usable == beat.memory_usable, "for an operator of the release before"
    assert abs(alpha.last_seen - wall_clock()) < 60
    assert beta.state == admin_pb2.NODE_STATE_OFFLINE
    assert list(beta.addresses) == ["127.0.0.1:7999"]


async def test_planning_changes_nothing(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await cluster.node("beta")
    before = await cluster.call("GetRoster", admin_pb2.GetAdminRosterRequest())
    request = admin_pb2.PlanDeploymentRequest(spec=create(stages=2).spec)
    planned = (await cluster.call("PlanDeployment", request)).plan
    assert [stage.end_layer - stage.first_layer for stage in planned.rings[0].stages] == [5, 4]
    assert planned.spec.context == 512
    assert planned.spec.trust_floor == 10
    after = await cluster.call("GetRoster", admin_pb2.GetAdminRosterRequest())
    assert before == after
    made = (await cluster.call("CreateDeployment", create(stages=2))).plan
    assert made.plan_hash == planned.plan_hash
    again = await cluster.call("PlanDeployment", request)
    assert again.plan.plan_hash == made.plan_hash, "every node serves it, and is free for its plan"
    assert again.shapes.shapes


async def test_a_plan_tells_what_other_shapes_would_bring(cluster: Cluster) -> None:
    """Rates come with the first ring that loads the model; a deployment of several replicas has no table."""
    for name in ("alpha", "beta"):
        await cluster.node(name)
    request = admin_pb2.PlanDeploymentRequest(spec=create().spec)
    table = (await cluster.call("PlanDeployment", request)).shapes
    found = [(one.strategy, len(one.groups), one.planned, one.one_request) for one in table.shapes]
    assert ("pipeline", 1, True, 0) in found
    assert ("tensor", 1, False, 0) in found
    assert "the speed of alpha, beta with this model is not known" in "\n".join(table.reasons)
    request = admin_pb2.PlanDeploymentRequest(spec=create(replicas=2).spec)
    assert not (await cluster.call("PlanDeployment", request)).shapes.shapes
    with pytest.raises(InvalidInput) as mixed:
        await cluster.call("CreateDeployment", create(strategy="mixed"))
    assert mixed.value.reason == "BAD_DEPLOYMENT"


async def test_an_unknown_model_lists_what_every_node_said(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await cluster.node("beta")
    with pytest.raises(NotFound) as caught:
        await cluster.call("CreateDeployment", create(model="nothing"))
    error = caught.value
    assert error.reason == "UNKNOWN_MODEL"
    assert error.metadata["param"] == "model"
    assert "alpha: there is no such model folder" in error.message
    assert "beta: there is no such model folder" in error.message
    assert "model folders" in error.hint


def test_what_is_wrong_with_a_model_that_is_there_comes_with_its_own_hint() -> None:
    missing = NotFound("there is no model m", hint="put it somewhere", reason="MODEL_NOT_FOUND")
    broken = ModelError("it holds a pipe", hint="convert it again")
    error = nobody_has(
        "m", [ProfileReply("a", None, missing), ProfileReply("b", None, broken)], {"a": "alpha"}
    )
    assert "(alpha: there is no model m; b: it holds a pipe)" in error.message
    assert error.hint == "convert it again"


async def test_nodes_with_another_version_of_the_model_are_left_out(cluster: Cluster) -> None:
    other = await cluster.node("alpha", profile=small_profile("cd" * 32))
    big = await cluster.node("beta", memory=4 * GIB)
    plan = (await cluster.call("CreateDeployment", create())).plan
    assert [stage.member for stage in plan.rings[0].stages] == [big.id]
    with pytest.raises(SealringError) as caught:
        await cluster.call("CreateDeployment", create(name="two", members=[other.id, big.id], stages=2))
    assert caught.value.reason == "NODE_NOT_USABLE"


async def test_what_does_not_fit_is_refused_with_the_numbers(cluster: Cluster) -> None:
    await cluster.node("alpha", memory=5000)
    with pytest.raises(ResourceExhausted) as caught:
        await cluster.call("CreateDeployment", create())
    error = caught.value
    assert error.reason == "DOES_NOT_FIT"
    assert int(error.metadata["needed_bytes"]) > int(error.metadata["available_bytes"])


async def test_a_name_is_taken_once_even_by_two_at_a_time(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await cluster.node("beta")
    results = await asyncio.gather(
        *(cluster.call("CreateDeployment", create(stages=1)) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == [
        "AlreadyExists",
        "CreateDeploymentResponse",
    ]
    refused = next(one for one in results if isinstance(one, AlreadyExists))
    assert refused.metadata["param"] == "name"
    planned = await cluster.call("PlanDeployment", admin_pb2.PlanDeploymentRequest(spec=create().spec))
    assert planned.plan.spec.name == create().spec.name


async def test_a_member_serves_several_rings_and_says_which(cluster: Cluster) -> None:
    await cluster.node("alpha")
    await cluster.call("CreateDeployment", create())
    made = await cluster.call("CreateDeployment", create(name="two"))
    assert any("alpha also serves demo-0" in reason for reason in made.plan.reasons)
    (alpha,) = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).nodes
    assert [(one.ring, one.rank, one.end_layer) for one in alpha.rings] == [("demo-0", 0, 9), ("two-0", 0, 9)]
    assert alpha.rings[1].memory == memory_of(made.plan.rings[0].stages[0])


async def test_nobody_has_joined(cluster: Cluster) -> None:
    with pytest.raises(SealringError) as caught:
        await cluster.call("CreateDeployment", create())
    assert caught.value.reason == "NOT_ENOUGH_NODES"
    assert caught.value.message == "no node has joined"


@pytest.mark.parametrize(
    ("method", "message", "kind"),
    [
        ("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="nothing"), NotFound),
        ("EvictNode", admin_pb2.EvictNodeRequest(id="zz"), InvalidInput),
        ("EvictNode", admin_pb2.EvictNodeRequest(id=encode_base32(bytes(32))), NotFound),
        ("BanNode", admin_pb2.BanNodeRequest(id=encode_base32(bytes(32))), NotFound),
        ("DrainNode", admin_pb2.DrainNodeRequest(id=encode_base32(bytes(32))), NotFound),
        ("ListAuditLog", admin_pb2.ListAuditLogRequest(limit=1001), InvalidInput),
        ("ListAuditLog", admin_pb2.ListAuditLogRequest(after=1 << 63), InvalidInput),
    ],
)
async def test_bad_requests_get_one_clear_error(
    cluster: Cluster, method: str, message: Any, kind: type[SealringError]
) -> None:
    with pytest.raises(kind):
        await cluster.call(method, message)


async def test_the_roster_is_verifiable_by_anyone_with_the_pin(cluster: Cluster) -> None:
    await cluster.join("alpha")
    answer = await cluster.call("GetRoster", admin_pb2.GetAdminRosterRequest())
    pin = load_machine_state(cluster.settings.state_dir / "operator").root_sha256
    root = verify_root_chain(decode_chain(answer.root_metadata), pin, now=wall_clock())
    roster = check_roster(answer.roster, root, now=wall_clock())
    assert [member.level for member in roster.members] == ["software"]
    assert roster.expires - roster.issued == 720


async def test_too_many_open_tokens_are_no_fault_of_the_request(cluster: Cluster) -> None:
    now = int(wall_clock())
    with cluster.coordinator.store.transaction():
        for number in range(MAX_OPEN_TOKENS - 1):
            token = storekit.token(str(number), now=now)
            cluster.coordinator.store.tokens.add(token, b"")
    await cluster.token()
    with pytest.raises(ResourceExhausted) as caught:
        await cluster.token()
    assert caught.value.reason == "TOO_MANY_TOKENS"


async def test_every_change_is_in_the_audit_log(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await cluster.call("CreateDeployment", create())
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=node.id))
    await cluster.call("DrainNode", admin_pb2.DrainNodeRequest(id=node.id, undo=True))
    await cluster.call("DeleteDeployment", admin_pb2.DeleteDeploymentRequest(name="demo"))
    await cluster.call("BanNode", admin_pb2.BanNodeRequest(id=node.id))
    entries = await audit(cluster)
    actions = [(entry.actor, entry.action) for entry in entries]
    assert actions == [
        ("init", "create_cluster"),
        ("operator", "create_join_token"),
        (node.id, "enrol"),
        ("operator", "create_deployment"),
        ("operator", "drain_node"),
        ("operator", "undo_drain_node"),
        ("operator", "delete_deployment"),
        ("operator", "ban_node"),
    ]


async def test_what_cannot_be_stored_is_not_begun(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain, the end of one, and an eviction: the roster would know nothing of it."""
    node, other = await cluster.node("alpha"), await cluster.node("beta")
    moves = cluster.coordinator.cluster.moves
    drain = admin_pb2.DrainNodeRequest(id=node.id)
    undo = admin_pb2.DrainNodeRequest(id=node.id, undo=True)

    def full(_: object) -> None:
        raise Unavailable("no room", reason="STATE_UNWRITABLE")

    async def refused(method: str, request: Any) -> None:
        with monkeypatch.context() as disk, pytest.raises(Unavailable) as caught:
            disk.setattr(cluster.coordinator.store.rosters, "add", full)
            await cluster.call(method, request)
        assert caught.value.reason == "STATE_UNWRITABLE"

    await refused("DrainNode", drain)
    assert moves.draining == set()
    monkeypatch.setattr(cluster.coordinator.driver, "look", lambda: None)  # else the drain is over at once
    await cluster.call("DrainNode", drain)
    await refused("DrainNode", undo)
    assert moves.draining == {node.id}
    await cluster.call("DrainNode", undo)
    assert moves.draining == set()
    await refused("EvictNode", admin_pb2.EvictNodeRequest(id=other.id))
    assert cluster.coordinator.sessions.find(other.id) is not None


async def test_a_banned_node_never_comes_back_and_an_evicted_one_may(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=node.id))
    assert await node.ended_with() == "EVICTED"
    assert await cluster.refusal("alpha") == "NOT_ENROLLED"
    await cluster.join("alpha")
    again = await cluster.node("alpha", join=False)
    await cluster.call("BanNode", admin_pb2.BanNodeRequest(id=again.id))
    assert await again.ended_with() == "BANNED"
    with pytest.raises(PermissionDenied) as refused:
        await cluster.join("alpha")
    assert refused.value.reason == "JOIN_REFUSED"


@pytest.mark.parametrize("role", [Role.MEMBER, Role.GATEWAY])
async def test_every_admin_call_is_guarded(cluster: Cluster, role: Role) -> None:
    enrolled = await cluster.join("alpha", role=role)
    service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
    async with channel_to(cluster.coordinator.main_address(), enrolled.state.tls) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        for method in service.methods:
            message = getattr(admin_pb2, method.input_type.name)()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(stub, method.name)(message, timeout=200)
            assert from_rpc_error(caught.value).reason == "WRONG_ROLE", method.name


async def test_gateways_and_members_keep_to_their_own_services(cluster: Cluster) -> None:
    member = await cluster.join("alpha")
    gateway = await cluster.join("gate", role=Role.GATEWAY)
    async with channel_to(cluster.coordinator.main_address(), member.state.tls) as channel:
        watch = membership_pb2_grpc.SchedulingStub(channel).Follow()
        await watch.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
        assert from_rpc_error(caught.value).reason == "WRONG_ROLE"
    async with channel_to(cluster.coordinator.main_address(), gateway.state.tls) as channel:
        session = membership_pb2_grpc.MembershipStub(channel).Session()
        await session.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.read()
        assert from_rpc_error(caught.value).reason == "WRONG_ROLE"


async def test_a_caller_without_a_certificate_gets_nowhere(cluster: Cluster) -> None:
    from sealring.mesh.rpc import joining_channel

    root = cluster.coordinator.keys.root
    async with joining_channel(cluster.coordinator.main_address(), root.authorities) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminStub(channel).ListNodes(admin_pb2.ListNodesRequest(), timeout=100)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_who_was_evicted_may_be_banned(cluster: Cluster) -> None:
    joined = await cluster.join("alpha")
    member = joined.state.peer.id
    for method in ("EvictNode", "BanNode"):
        await cluster.call(method, getattr(admin_pb2, f"{method}Request")(id=member))
    assert cluster.coordinator.store.members.banned(member)


async def test_what_is_done_with_a_nodes_models_stands_in_the_log(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    for method, to_plan in (("PullModel", True), ("RemoveModel", False)):
        fields = {"to_plan": True} if to_plan else {}
        request = getattr(admin_pb2, f"{method}Request")(id=node.id, model="m", **fields)
        await cluster.call(method, request)
        asked = await node.wait_for("change_model", lambda one, to_plan=to_plan: one.to_plan == to_plan)
        assert (asked.model, asked.remove) == ("m", not to_plan)
    told = [(one.action, one.subject, dict(one.details)) for one in (await audit(cluster))[-2:]]
    details = {"name": "alpha", "model": "m"}
    assert told == [("pull_model", node.id, details), ("remove_model", node.id, details)]


def test_each_rpc_has_one_handler_with_a_role(cluster: Cluster) -> None:
    """One that is missing would be answered as not implemented, and one without a role for anybody."""
    service = cluster.coordinator.admin
    nouns = {handler.__self__ for handler in vars(service).values()}
    assert vars(AdminService(*nouns)) == vars(service)
    assert {handler.needs for handler in vars(service).values()} == set(OperatorRole)
    for left in nouns:
        with pytest.raises(TypeError):
            AdminService(*(nouns - {left}))
        with pytest.raises(TypeError):
            AdminService(*nouns, left)
