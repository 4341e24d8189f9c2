"""Operators: every call of the Admin service by every role, keys that are bound, and being thrown out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import storekit
from patience import until

from sealring.coordinator.auth import operators as operators_module
from sealring.coordinator.auth.operators import MAX_OPERATOR_SECONDS, MAX_OPERATORS
from sealring.coordinator.init import init, new_operator, renew_operator_bundle
from sealring.coordinator.keys import OPERATOR_ID
from sealring.coordinator.rings.traces import Traces
from sealring.coordinator.store import OperatorRole
from sealring.mesh.crypto import Label, SoftwareSigner
from sealring.mesh.errors import ConfigError, PermissionDenied, SealringError
from sealring.mesh.member import IDENTITY_KEY, load_machine_state, parse_pem_leaf
from sealring.mesh.pki import (
    LeafKey,
    PeerIdentity,
    Role,
    TlsMaterial,
    certificate_peer,
    expires_at,
    key_hash,
    load_certificate,
)
from sealring.mesh.rpc import Buckets, from_rpc_error
from sealring.v1 import admin_pb2, admin_pb2_grpc, membership_pb2, membership_pb2_grpc, trace_pb2
from tests.coordinator.conftest import SERVING, Cluster, channel_to, deploy, ring_state

READ = {
    "ListJoinTokens",
    "ListNodes",
    "ListDeployments",
    "GetRoster",
    "ListAuditLog",
    "ListOperators",
    "TraceRing",
}
EMPTY_REQUEST = {"TraceRing": "BAD_DURATION"}
"""What calls that were let in answer to a request without content, if not something."""

ADMIN = {
    "DiagnoseNode",
    "CreateJoinToken",
    "RevokeJoinToken",
    "CreateJoinCode",
    "RevokeJoinCode",
    "ShowJoinCode",
    "DrainNode",
    "EvictNode",
    "BanNode",
    "CreateDeployment",
    "PlanDeployment",
    "DeleteDeployment",
    "AddOperator",
    "RotateOperator",
    "RevokeOperator",
    "CopyState",
    "StandDown",
    "PullModel",
    "RemoveModel",
}
REFUSED = {"OPERATOR_ROLE", "OPERATOR_REVOKED", "OPERATOR_EXPIRED", "WRONG_ROLE"}
RESERVED = ("operator", "coordinator", "init")
_REVOKES = {"EvictNode": admin_pb2.EvictNodeRequest, "BanNode": admin_pb2.BanNodeRequest}
_ROLES = {"read": admin_pb2.OPERATOR_ROLE_READ, "admin": admin_pb2.OPERATOR_ROLE_ADMIN}


async def add(cluster: Cluster, name: str, role: str, **more: Any) -> TlsMaterial:
    leaf = LeafKey()
    request = admin_pb2.AddOperatorRequest(name=name, role=_ROLES[role], csr=leaf.csr(), **more)
    return material(cluster, leaf, await cluster.call("AddOperator", request))


def material(cluster: Cluster, leaf: LeafKey, answer: Any) -> TlsMaterial:
    authorities = cluster.coordinator.keys.root.authorities
    return TlsMaterial(leaf.private_pem(), parse_pem_leaf(answer.certificate_chain), authorities)


async def call(cluster: Cluster, tls: TlsMaterial, method: str, request: Any = None) -> str:
    """What became of a call on a connection of its own: "" if it was answered."""
    if request is None:
        service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
        request = getattr(admin_pb2, service.methods_by_name[method].input_type.name)()
    async with channel_to(cluster.coordinator.main_address(), tls) as channel:
        try:
            await getattr(admin_pb2_grpc.AdminStub(channel), method)(request, timeout=200)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
    return ""


def store(cluster: Cluster) -> Any:
    return cluster.coordinator.store


async def test_the_table_of_calls_and_roles(cluster: Cluster) -> None:
    """Every call by a reader, an admin, a revoked one, an expired one and one of an unknown role."""
    methods = {method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods}
    assert methods == READ | ADMIN
    roles = {"reader": "read", "chief": "admin", "gone": "admin", "late": "admin", "odd": "admin"}
    bundles = {name: await add(cluster, name, role) for name, role in roles.items()}
    await cluster.call("RevokeOperator", admin_pb2.RevokeOperatorRequest(name="gone"))
    operators = store(cluster).operators
    operators.save(storekit.changed(operators.get("late"), expires=int(time.time()) - 1))
    operators.save(storekit.changed(operators.get("odd"), role="superuser"))
    for method in sorted(methods):
        found = {name: await call(cluster, tls, method) for name, tls in bundles.items()}
        assert found["chief"] not in REFUSED, method
        assert (found["reader"] == "OPERATOR_ROLE") == (method in ADMIN), method
        assert found["reader"] not in REFUSED - {"OPERATOR_ROLE"}, method
        assert (found["gone"], found["late"], found["odd"]) == (
            "OPERATOR_REVOKED",
            "OPERATOR_EXPIRED",
            "OPERATOR_ROLE",
        ), method
        if method in READ:
            assert found["reader"] == found["chief"] == EMPTY_REQUEST.get(method, ""), method
    listed = (await cluster.call("ListOperators", admin_pb2.ListOperatorsRequest())).operators
    assert {one.name: one.role for one in listed} == {
        "reader": admin_pb2.OPERATOR_ROLE_READ,
        "chief": admin_pb2.OPERATOR_ROLE_ADMIN,
        "late": admin_pb2.OPERATOR_ROLE_ADMIN,
        "odd": admin_pb2.OPERATOR_ROLE_UNSPECIFIED,
        OPERATOR_ID: admin_pb2.OPERATOR_ROLE_ADMIN,
    }


async def test_a_refused_call_changes_nothing(cluster: Cluster) -> None:
    reader = await add(cluster, "reader", "read")
    before = store(cluster).audit.entries(after=0, limit=100)
    leaf = LeafKey()
    climb = admin_pb2.AddOperatorRequest(name="me-too", role=admin_pb2.OPERATOR_ROLE_ADMIN, csr=leaf.csr())
    assert await call(cluster, reader, "AddOperator", climb) == "OPERATOR_ROLE"
    itself = admin_pb2.RotateOperatorRequest(name="reader", csr=leaf.csr())
    assert await call(cluster, reader, "RotateOperator", itself) == "OPERATOR_ROLE"
    assert await call(cluster, reader, "CreateJoinToken") == "OPERATOR_ROLE"
    assert store(cluster).audit.entries(after=0, limit=100) == before


async def test_the_audit_log_names_the_operator(cluster: Cluster) -> None:
    chief = await add(cluster, "chief", "admin")
    request = admin_pb2.CreateJoinTokenRequest(role=1)
    assert await call(cluster, chief, "CreateJoinToken", request) == ""
    assert await call(cluster, chief, "RevokeOperator", admin_pb2.RevokeOperatorRequest(name="chief")) == ""
    entries = store(cluster).audit.entries(after=0, limit=100)
    assert [(one.actor, one.action, one.subject) for one in entries if "token" not in one.action] == [
        ("init", "create_cluster", "test"),
        (OPERATOR_ID, "add_operator", "chief"),
        ("chief", "revoke_operator", "chief"),
    ]
    assert [one.actor for one in entries if one.action == "create_join_token"] == ["chief"]
    added = next(one for one in entries if one.action == "add_operator").details
    assert (added["role"], added["key"]) == ("admin", key_hash(chief.certificate).hex())


async def test_the_authoritys_key_alone_makes_no_operator(cluster: Cluster) -> None:
    """A certificate of the cluster's own authority for an operator's name, with another key."""
    await add(cluster, "chief", "admin")
    keys = cluster.coordinator.keys
    for name in ("chief", OPERATOR_ID, "nobody"):
        leaf = LeafKey()
        peer = PeerIdentity("test", Role.OPERATOR, name)
        forged = keys.ca.issue(leaf.csr(), peer, lifetime=3600, now=time.time())
        tls = TlsMaterial(leaf.private_pem(), forged, keys.root.authorities)
        assert {await call(cluster, tls, method) for method in READ | ADMIN} == {"OPERATOR_REVOKED"}


async def test_rotation_replaces_the_key_at_once(cluster: Cluster) -> None:
    old = await add(cluster, "reader", "read")
    leaf = LeafKey()
    request = admin_pb2.RotateOperatorRequest(name="reader", csr=leaf.csr(), ttl_seconds=60)
    new = material(cluster, leaf, await cluster.call("RotateOperator", request))
    assert await call(cluster, old, "ListNodes") == "OPERATOR_REVOKED"
    assert await call(cluster, new, "ListNodes") == ""
    assert await call(cluster, new, "CreateJoinToken") == "OPERATOR_ROLE"
    assert 0 < expires_at(new.certificate) - time.time() <= 61


async def test_an_open_connection_is_refused_from_the_revocation_on(cluster: Cluster) -> None:
    tls = await add(cluster, "chief", "admin")
    async with channel_to(cluster.coordinator.main_address(), tls) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=200)
        await cluster.call("RevokeOperator", admin_pb2.RevokeOperatorRequest(name="chief"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=200)
    assert from_rpc_error(caught.value).reason == "OPERATOR_REVOKED"


@pytest.mark.parametrize("how", ["revoke", "rotate"])
async def test_what_a_revoked_operator_has_running_ends(cluster: Cluster, how: str) -> None:
    """A deployment that waits for a silent node; another operator's goes on."""
    node = await cluster.node("alpha")
    node.profiles = False
    bundles = [await add(cluster, name, "admin") for name in ("chief", "other")]
    channels = [channel_to(cluster.coordinator.main_address(), tls) for tls in bundles]
    spec = [admin_pb2.DeploymentSpec(name=name, model="demo") for name in ("one", "two")]
    calls = [
        admin_pb2_grpc.AdminStub(channel).CreateDeployment(
            admin_pb2.CreateDeploymentRequest(spec=one), timeout=30
        )
        for channel, one in zip(channels, spec, strict=True)
    ]
    async with asyncio.timeout(200):
        await until(lambda: sum(message.HasField("profile") for message in node.messages) >= 2)
        if how == "revoke":
            await cluster.call("RevokeOperator", admin_pb2.RevokeOperatorRequest(name="chief"))
        else:
            request = admin_pb2.RotateOperatorRequest(name="chief", csr=LeafKey().csr())
            await cluster.call("RotateOperator", request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls[0]
    assert from_rpc_error(caught.value).reason == "OPERATOR_REVOKED"
    assert not calls[1].done()
    calls[1].cancel()
    for channel in channels:
        await channel.close()
    assert not store(cluster).deployments.all()
    await until(lambda: not cluster.coordinator.operators.running)


async def test_bad_operators_are_not_added(cluster: Cluster) -> None:
    await add(cluster, "taken", "read")
    for changes, reason in (
        *(({"name": name}, "BAD_NAME") for name in ("", "Not A Name", "x" * 33, *RESERVED)),
        ({"name": "taken"}, "OPERATOR_EXISTS"),
        ({"role": 0}, "BAD_ROLE"),
        ({"role": 7}, "BAD_ROLE"),
        ({"csr": b""}, "BAD_CSR"),
        ({"csr": b"x" * 5000}, "BAD_CSR"),
        ({"ttl_seconds": MAX_OPERATOR_SECONDS + 1}, "BAD_TTL"),
    ):
        values = {"name": "new", "role": _ROLES["read"], "csr": LeafKey().csr(), **changes}
        with pytest.raises(SealringError) as caught:
            await cluster.call("AddOperator", admin_pb2.AddOperatorRequest(**values))
        assert caught.value.reason == reason
    assert {one.name for one in store(cluster).operators.all()} == {OPERATOR_ID, "taken"}


async def test_operators_are_bounded(cluster: Cluster) -> None:
    operators = store(cluster).operators
    for number in range(MAX_OPERATORS - len(operators.all())):
        operators.save(storekit.changed(operators.get(OPERATOR_ID), name=f"n{number}"))
    with pytest.raises(SealringError) as caught:
        await add(cluster, "new", "read")
    assert caught.value.reason == "TOO_MANY_OPERATORS"
    await cluster.call("RevokeOperator", admin_pb2.RevokeOperatorRequest(name="n0"))
    await add(cluster, "new", "read", ttl_seconds=60)


@pytest.mark.parametrize(
    ("name", "reason"), [("nobody", "UNKNOWN_OPERATOR"), (OPERATOR_ID, "OPERATOR_OF_THE_COORDINATOR")]
)
async def test_what_cannot_be_rotated(cluster: Cluster, name: str, reason: str) -> None:
    with pytest.raises(SealringError) as caught:
        request = admin_pb2.RotateOperatorRequest(name=name, csr=LeafKey().csr())
        await cluster.call("RotateOperator", request)
    assert caught.value.reason == reason


async def test_an_unknown_role_is_not_rotated_into_a_known_one(cluster: Cluster) -> None:
    operators = store(cluster).operators
    operators.save(storekit.changed(operators.get(OPERATOR_ID), name="odd", role="superuser"))
    with pytest.raises(PermissionDenied):
        request = admin_pb2.RotateOperatorRequest(name="odd", csr=LeafKey().csr())
        await cluster.call("RotateOperator", request)


async def test_a_stolen_bundle_of_the_coordinator_is_revoked_and_replaced(
    start_cluster: Callable[..., Awaitable[Cluster]],
) -> None:
    cluster = await start_cluster()
    with pytest.raises(ConfigError) as caught:
        new_operator(cluster.settings)
    assert caught.value.reason == "STATE_IN_USE"
    stolen = load_machine_state(cluster.settings.state_dir / "operator").tls
    await cluster.call("RevokeOperator", admin_pb2.RevokeOperatorRequest(name=OPERATOR_ID))
    assert await call(cluster, stolen, "ListNodes") == "OPERATOR_REVOKED"
    assert cluster.coordinator.renew_operator() is None
    await cluster.close()

    again = await start_cluster()
    assert await call(again, stolen, "ListNodes") == "OPERATOR_REVOKED"
    await again.close()
    new_operator(again.settings)

    last = await start_cluster()
    assert await call(last, stolen, "ListNodes") == "OPERATOR_REVOKED"
    entries = (await last.call("ListAuditLog", admin_pb2.ListAuditLogRequest())).entries
    assert [(one.actor, one.action) for one in entries][-2:] == [
        (OPERATOR_ID, "revoke_operator"),
        ("coordinator", "new_operator"),
    ]
    await last.close()


async def test_the_coordinators_own_bundle_is_renewed_for_the_same_key(cluster: Cluster) -> None:
    folder = cluster.settings.state_dir
    before = load_machine_state(folder / "operator").tls
    later = time.time() + MAX_OPERATOR_SECONDS / 2
    address = cluster.coordinator.main_address()
    renewed = renew_operator_bundle(folder, store(cluster), cluster.coordinator.keys, address, now=later)
    after = load_machine_state(folder / "operator").tls
    assert after.certificate == renewed != before.certificate
    assert (after.private_key, key_hash(after.certificate)) == (
        before.private_key,
        key_hash(before.certificate),
    )
    assert store(cluster).operators.get(OPERATOR_ID).expires == int(expires_at(after.certificate))


def test_a_database_without_the_operators_request_is_refused(tmp_path: Path) -> None:
    from sealring.coordinator.main import Coordinator
    from sealring.coordinator.settings import CoordinatorSettings

    made = CoordinatorSettings(state_dir=tmp_path / "c", listen="127.0.0.1:0", join_listen="127.0.0.1:0")
    init(made)
    coordinator = Coordinator(made)
    known = coordinator.store.operators.get(OPERATOR_ID)
    assert known.role == OperatorRole.ADMIN
    coordinator.store.operators.save(storekit.changed(known, role="superuser"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        coordinator.renew_operator()
    assert caught.value.reason == "STATE_CORRUPT"
    coordinator.store.close()


async def client_of(cluster: Cluster, name: str) -> TlsMaterial:
    """What a node of this name gets for its machine's programs."""
    folder = cluster.folder / name
    state, leaf = load_machine_state(folder), LeafKey()
    csr = leaf.csr()
    signature = SoftwareSigner.load(folder / IDENTITY_KEY).sign(Label.CSR, csr)
    async with channel_to(cluster.coordinator.main_address(), state.tls) as channel:
        request = membership_pb2.RenewRequest(csr=csr, signature=signature, client=True)
        answer = await membership_pb2_grpc.CertificatesStub(channel).Renew(request, timeout=200)
    return material(cluster, leaf, answer)


async def test_members_read(cluster: Cluster) -> None:
    """Every call by a member's programs, by those of an earlier certificate, by a forged one with another
    key, and by the evicted member's."""
    await cluster.join("one")
    before, own = await client_of(cluster, "one"), await client_of(cluster, "one")
    peer = certificate_peer(load_certificate(own.certificate))
    assert (peer.role, peer.id) == (Role.CLIENT, load_machine_state(cluster.folder / "one").peer.id)
    keys, leaf = cluster.coordinator.keys, LeafKey()
    der = keys.ca.issue(leaf.csr(), peer, lifetime=3600, now=time.time())
    forged = TlsMaterial(leaf.private_pem(), der, keys.root.authorities)
    seen = store(cluster).audit.entries(after=0, limit=100)
    for method in sorted(READ | ADMIN):
        found = await call(cluster, own, method)
        if method == "PlanDeployment":  # which changes nothing
            assert found not in REFUSED | {"MEMBERS_READ"}
        else:
            assert found == (EMPTY_REQUEST.get(method, "") if method in READ else "MEMBERS_READ"), method
        assert {await call(cluster, tls, method) for tls in (before, forged)} == {"OPERATOR_REVOKED"}, method
    assert store(cluster).audit.entries(after=0, limit=100) == seen, "nothing was changed"
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=peer.id))
    assert {await call(cluster, own, method) for method in READ | ADMIN} == {"OPERATOR_REVOKED"}
    await cluster.join("one")
    assert await call(cluster, own, "ListNodes") == "OPERATOR_REVOKED", "its machine has to ask anew"


@pytest.mark.parametrize("how", ["EvictNode", "BanNode"])
async def test_what_an_evicted_members_programs_have_running_ends(
    cluster: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member's call goes on."""

    async def for_ever(*asked: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Traces, "trace", for_ever)
    own = []
    for name in ("one", "two"):
        await cluster.join(name)
        own.append(await client_of(cluster, name))
    channels = [channel_to(cluster.coordinator.main_address(), tls) for tls in own]
    calls = [
        admin_pb2_grpc.AdminStub(one).TraceRing(admin_pb2.TraceRingRequest(), timeout=200) for one in channels
    ]
    await until(lambda: len(cluster.coordinator.operators.running) == 2)
    await cluster.call(how, _REVOKES[how](id=certificate_peer(load_certificate(own[0].certificate)).id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[0]
    assert from_rpc_error(caught.value).reason == "OPERATOR_REVOKED"
    assert not calls[1].done()
    for channel in channels:
        await channel.close()


async def test_a_members_certificate_that_has_ended_opens_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may have been opened before."""
    await cluster.join("one")
    own = await client_of(cluster, "one")
    async with channel_to(cluster.coordinator.main_address(), own) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=200)
        monkeypatch.setattr(operators_module, "expires_at", lambda certificate: 0.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=200)
    assert from_rpc_error(caught.value).reason == "OPERATOR_REVOKED"


async def test_only_nodes_have_programs(cluster: Cluster) -> None:
    await cluster.join("edge", role=Role.GATEWAY)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client_of(cluster, "edge")
    assert from_rpc_error(caught.value).reason == "WRONG_ROLE"


async def test_the_programs_of_one_member_keep_no_other_from_looking(cluster: Cluster) -> None:
    for name in ("one", "two"):
        await cluster.join(name)
    greedy, other = await client_of(cluster, "one"), await client_of(cluster, "two")
    cluster.coordinator.operators.members = Buckets(1e-6, 2)
    assert [await call(cluster, greedy, "ListNodes") for _ in range(3)] == ["", "", "RATE_LIMITED"]
    assert await call(cluster, other, "ListNodes") == ""


async def test_a_members_programs_name_no_folder_that_is_not_deployed(cluster: Cluster) -> None:
    """A plan has nodes open what it names, and tells whether it is there."""
    node = await cluster.node("one")
    own = await client_of(cluster, "one")
    asked: list[str] = []

    async def tell_profile(request: membership_pb2.ProfileRequest) -> None:
        asked.append(request.model)
        await node.send(profile=membership_pb2.ProfileResult(id=request.id, profile=node.profile))

    node.tell_profile = tell_profile  # type: ignore[method-assign]

    async def plan(**named: str) -> str:
        spec = admin_pb2.DeploymentSpec(name="new", **{"model": "demo", **named})
        return await call(cluster, own, "PlanDeployment", admin_pb2.PlanDeploymentRequest(spec=spec))

    refused = {await plan(**{field: "/etc"}) for field in ("model", "draft", "adapter")}
    assert (refused, asked) == ({"PATH_NOT_DEPLOYED"}, [])
    await deploy(cluster, name="served", model="/models/qwen", stages=1)
    cluster.coordinator.operators.members = Buckets(1e-6, 1000)
    assert await plan(model="/models/qwen") != "PATH_NOT_DEPLOYED"
    assert await plan() != "PATH_NOT_DEPLOYED"


async def test_a_members_programs_see_the_times_of_a_ring_and_nothing_else(cluster: Cluster) -> None:
    """A ring that their machine has no part in shows who computes what when, in numbers. They name no other
    question to its members."""
    ring, beside = await cluster.node("one"), await cluster.node("beside")
    await deploy(cluster, stages=1, members=[ring.id])
    await ring_state(cluster, SERVING)
    own = await client_of(cluster, "beside")

    async def answer() -> None:
        done: set[int] = set()
        while True:
            question = await ring.wait_for("trace", lambda one: one.id not in done, seconds=200)
            done.add(question.id)
            now = time.perf_counter_ns()
            told = trace_pb2.ProcessTrace(
                spans=[trace_pb2.Span(activity=trace_pb2.ACTIVITY_SEND, step=3, start=now)], since=1
            )
            spans = [told] if question.window else []
            await ring.send(
                trace=membership_pb2.TraceAnswer(id=question.id, asked=now, answered=now, processes=spans)
            )

    answering = asyncio.create_task(answer())
    try:
        async with channel_to(cluster.coordinator.main_address(), own) as channel:
            trace = admin_pb2_grpc.AdminStub(channel).TraceRing
            found = await trace(admin_pb2.TraceRingRequest(ring="demo-0", milliseconds=1), timeout=200)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await trace(admin_pb2.TraceRingRequest(ring="demo-0", milliseconds=1), timeout=200)
    finally:
        answering.cancel()
    assert from_rpc_error(caught.value).reason == "RATE_LIMITED"
    (member,) = found.members
    assert (found.ring, member.member, [one.step for one in member.spans]) == ("demo-0", ring.id, [3])
    texts = {
        one.name for one in member.spans[0].DESCRIPTOR.fields if one.type in (one.TYPE_STRING, one.TYPE_BYTES)
    }
    assert not texts, "a span has numbers alone"
    assert not any(message.HasField("trace") for message in beside.messages)
