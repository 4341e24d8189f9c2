"""Joining end to end: one token, one member; a refusal never says why; a bad coordinator is found out."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
import structlog

from sealring.coordinator.members.enrolment import check_form
from sealring.coordinator.services.enrolment import EnrolmentService
from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import KeyType, Label, SoftwareSigner, encode_base32, member_id
from sealring.mesh.errors import (
    InvalidInput,
    PermissionDenied,
    RosterError,
    SealringError,
)
from sealring.mesh.member import JoinToken, NodeEvidence, enrol, join_content, load_machine_state
from sealring.mesh.pki import LeafKey, Role
from sealring.mesh.roster import RosterReader
from sealring.mesh.rpc import from_rpc_error, joining_channel
from sealring.mesh.trust.attestation import Statement, sign_statement
from sealring.v1 import admin_pb2, membership_pb2, membership_pb2_grpc
from tests.coordinator.conftest import Cluster


async def test_a_node_joins_and_keeps_what_it_needs(cluster: Cluster) -> None:
    joined = await cluster.join("alpha")
    folder = cluster.folder / "alpha"
    state = load_machine_state(folder)
    assert state == joined.state
    assert state.peer.role is Role.MEMBER
    assert state.coordinator == cluster.coordinator.main_address()
    assert joined.roster.member(state.peer.id).level == "software"
    assert RosterReader(state.root, folder / "roster-state.json", state.peer.id).accept(
        (folder / "roster.dsse").read_bytes()
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_machines_of_one_name_are_told_apart(cluster: Cluster) -> None:
    """As Macs are, that all call themselves alike; also a name that has no room for a number."""
    wanted = "m" * 63
    first, second, third = [await cluster.join(wanted, folder=folder) for folder in "abc"]
    names = [wanted, "m" * 61 + "-2", "m" * 61 + "-3"]
    assert [one.state.name for one in (first, second, third)] == names
    assert [load_machine_state(cluster.folder / folder).name for folder in "abc"] == names
    listed = (await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).nodes
    assert sorted(one.name for one in listed) == sorted(names)
    again = await cluster.join(wanted, folder="a")
    assert again.state.name == wanted, "its own name is not taken"
    gateway = await cluster.join(wanted, role=Role.GATEWAY, folder="gate")
    assert gateway.state.name == wanted


async def test_of_many_that_use_one_token_at_once_exactly_one_wins(cluster: Cluster) -> None:
    token = await cluster.token()
    results = await asyncio.gather(
        *(cluster.join(f"node-{number}", token=token) for number in range(12)), return_exceptions=True
    )
    assert [type(result).__name__ for result in results].count("Enrolled") == 1
    assert {result.reason for result in results if isinstance(result, SealringError)} == {"JOIN_REFUSED"}
    assert len((await cluster.call("ListNodes", admin_pb2.ListNodesRequest())).nodes) == 1


async def test_a_token_is_for_its_role(cluster: Cluster) -> None:
    await refused(cluster.join("alpha", token=await cluster.token(membership_pb2.ROLE_GATEWAY)))
    await refused(cluster.join("gate", role=Role.GATEWAY, token=await cluster.token()))


async def test_an_expired_token_is_refused(cluster: Cluster) -> None:
    token, store = await cluster.token(ttl=600), cluster.coordinator.store
    (stored,) = store.tokens.open(now=0)
    stored.expires -= 601
    store.tokens.add(stored, JoinToken.parse(token).secret)
    await refused(cluster.join("alpha", token=token))


async def test_a_token_of_another_cluster_sends_nothing(cluster: Cluster) -> None:
    good = JoinToken.parse(await cluster.token())
    other = dataclasses.replace(good, root_sha256=bytes(32))
    with pytest.raises(RosterError) as caught:
        await cluster.join("alpha", token=other.format())
    assert caught.value.reason == "ROOT_PIN"
    await cluster.join("alpha", token=good.format())


async def test_joining_again_keeps_the_rollback_memory(cluster: Cluster) -> None:
    first = await cluster.join("alpha")
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=first.state.peer.id))
    again = await cluster.join("alpha")
    assert again.state.peer == first.state.peer
    assert again.roster.version > first.roster.version
    (ended,) = again.roster.revoked
    before, since = (one.roster.member(first.state.peer.id).enrolled for one in (first, again))
    assert (ended.id, ended.enrolled) == (first.state.peer.id, before)
    assert before <= ended.at < since, "its first enrolment has ended, and its second has not"


async def test_one_identity_has_one_role(cluster: Cluster) -> None:
    signer = SoftwareSigner.generate()
    await cluster.join("alpha", signer=signer)
    await refused(cluster.join("gate", role=Role.GATEWAY, signer=signer))


async def test_evidence_below_the_floor_is_refused(start_cluster: Any) -> None:
    cluster = await start_cluster(trust_floor="self_signed")
    await refused(cluster.join("alpha"))


async def test_a_software_key_is_refused_unless_allowed(start_cluster: Any) -> None:
    cluster = await start_cluster(software_identity_allowed=False)
    with structlog.testing.capture_logs() as logs:
        await refused(cluster.join("alpha"))
    (refusal,) = [one for one in logs if one["event"] == "join_refused"]
    assert refusal["why"] == "SOFTWARE_NOT_ALLOWED"
    assert "software_identity_allowed" in refusal["hint"]
    assert (await cluster.join("gate", role=Role.GATEWAY)).roster.gateways


async def test_only_the_holder_of_a_good_token_hears_why_a_join_is_refused(start_cluster: Any) -> None:
    strict = await start_cluster(software_identity_allowed=False)
    token = await strict.token()
    with pytest.raises(PermissionDenied) as told:
        await strict.join("alpha", token=token)
    assert "level software" in told.value.message
    assert "software_identity_allowed" in told.value.hint
    assert told.value.metadata["cause"] == "SOFTWARE_NOT_ALLOWED"
    with pytest.raises(PermissionDenied) as told:
        await strict.join("gate", role=Role.GATEWAY, token=token)
    assert "the token is of another role" in told.value.message
    await strict.join("gate", role=Role.GATEWAY)
    used = await strict.token(membership_pb2.ROLE_GATEWAY)
    await strict.join("other", role=Role.GATEWAY, token=used)
    guessed = dataclasses.replace(JoinToken.parse(token), secret=bytes(32)).format()
    for worthless in (used, guessed):
        with pytest.raises(PermissionDenied) as refusal:
            await strict.join("late", role=Role.GATEWAY, token=worthless)
        assert refusal.value.message == "the join was refused"
        assert set(refusal.value.metadata) <= {"hint"}


async def refused(joining: Any, what: str = "") -> None:
    with pytest.raises(PermissionDenied) as caught:
        await joining
    assert caught.value.reason == "JOIN_REFUSED", what


class Joiner:
    """Builds a good join request, which a test then spoils."""

    def __init__(self, cluster: Cluster, stub: Any) -> None:
        self.cluster = cluster
        self.stub = stub
        self.signer = SoftwareSigner.generate()
        self.leaf = LeafKey()

    async def request(self, **changes: Any) -> membership_pb2.EnrolRequest:
        """Changes apply before signing."""
        token = JoinToken.parse(await self.cluster.token())
        nonce = (await self.stub.GetNonce(membership_pb2.GetNonceRequest(), timeout=200)).nonce
        sealing_key = bytes(range(32))
        values: dict[str, Any] = {
            "token_id": token.token_id,
            "token_secret": encode_base32(token.secret),
            "role": membership_pb2.ROLE_NODE,
            "identity_key": self.signer.public_key,
            "key_type": "software",
            "csr": self.leaf.csr(),
            "nonce": nonce,
            "sealing_key": sealing_key,
            "addresses": ["127.0.0.1:7999"],
            "name": "joiner",
        } | changes
        values["signature"] = self.sign(values)
        statement = Statement(
            "test", nonce, int(wall_clock()), self.signer.public_key, KeyType.SOFTWARE, sealing_key, bytes(32)
        )
        values["attestation"], values["attestation_signature"] = sign_statement(self.signer, statement)
        return membership_pb2.EnrolRequest(**values)

    def sign(self, values: dict[str, Any], cluster: str = "test") -> bytes:
        node = values | {"role": membership_pb2.ROLE_NODE}
        content = join_content(cluster, membership_pb2.EnrolRequest(**node))
        return self.signer.sign(Label.JOIN, content)

    async def send(self, request: membership_pb2.EnrolRequest) -> membership_pb2.EnrolResponse:
        try:
            answer: membership_pb2.EnrolResponse = await self.stub.Enrol(request, timeout=200)
            return answer
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


@pytest.fixture
async def joiner(cluster: Cluster) -> Any:
    root = cluster.coordinator.keys.root
    async with joining_channel(cluster.join_address, root.authorities) as channel:
        yield Joiner(cluster, membership_pb2_grpc.EnrolmentStub(channel))


async def test_a_request_is_good_once_and_its_nonce_too(joiner: Joiner) -> None:
    request = await joiner.request()
    answer = await joiner.send(request)
    assert answer.member_id == member_id(joiner.signer.public_key)
    await refused(joiner.send(request))


SPOILT: dict[str, Callable[[membership_pb2.EnrolRequest], dict[str, Any]]] = {
    "nonce": lambda good: {"nonce": bytes(32)},
    "token": lambda good: {"token_id": "a" * 16},
    "secret": lambda good: {"token_secret": encode_base32(bytes(32))},
    "no secret": lambda good: {"token_secret": "!"},
    "identity key": lambda good: {"identity_key": SoftwareSigner.generate().public_key},
    "other csr": lambda good: {"csr": LeafKey().csr()},
    "sealing key": lambda good: {"sealing_key": bytes(32)},
    "name": lambda good: {"name": "other"},
    "addresses": lambda good: {"addresses": [*good.addresses, "127.0.0.1:1"]},
    "signature": lambda good: {"signature": good.signature[:-1]},
    "label": lambda good: {"signature": good.attestation_signature},
    "attestation": lambda good: {"attestation": good.attestation.replace(b"test", b"tesu")},
    "label of the attestation": lambda good: {"attestation_signature": good.signature},
}


def changed(request: membership_pb2.EnrolRequest, **fields: Any) -> membership_pb2.EnrolRequest:
    values = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
    return membership_pb2.EnrolRequest(**(values | fields))


async def test_each_check_refuses_and_leaves_the_token_good(joiner: Joiner) -> None:
    """And the nonce is used up."""
    token: dict[str, Any] = {}
    for what, spoil in SPOILT.items():
        good = await joiner.request(**token)
        token = {"token_id": good.token_id, "token_secret": good.token_secret}
        await refused(joiner.send(changed(good, **spoil(good))), what)
        if what != "nonce":
            await refused(joiner.send(good), what)
    await refused(joiner.send(await joiner.request(**token, csr=b"no request at all")))
    await joiner.send(await joiner.request(**token))


async def test_malformed_requests_name_the_field(joiner: Joiner) -> None:
    for changes, param in (
        ({"role": membership_pb2.ROLE_UNSPECIFIED}, "role"),
        ({"identity_key": b"k" * 64}, "identity_key"),
        ({"key_type": "magic"}, "key_type"),
        ({"sealing_key": b"s" * 31}, "sealing_key"),
        ({"addresses": []}, "addresses"),
        ({"addresses": ["127.0.0.1:1"] * 9}, "addresses"),
        ({"addresses": ["nowhere"]}, "addresses"),
        ({"addresses": ["127.0.0.1:0"]}, "addresses"),
        ({"name": "Not A Name"}, "name"),
    ):
        with pytest.raises(InvalidInput) as caught:
            await joiner.send(await joiner.request(**changes))
        assert caught.value.metadata["param"] == param


FORM: dict[str, Any] = {
    "role": membership_pb2.ROLE_NODE,
    "token_id": "t",
    "token_secret": "s",
    "identity_key": bytes(65),
    "key_type": "software",
    "csr": b"c",
    "nonce": bytes(32),
    "signature": b"s",
    "sealing_key": bytes(32),
    "addresses": ["127.0.0.1:7999"],
    "name": "joiner",
}


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("token_id", 1, 64),
        ("token_secret", 1, 128),
        ("identity_key", 65, 65),
        ("csr", 1, 4096),
        ("nonce", 32, 32),
        ("signature", 1, 72),
        ("attestation", 0, 8192),
        ("attestation_signature", 0, 72),
    ],
)
def test_sizes_are_taken_up_to_their_limits(field: str, low: int, high: int) -> None:
    one = "x" if field.startswith("token") else b"x"
    for size in (low - 1, low, high, high + 1):
        request = membership_pb2.EnrolRequest(**(FORM | {field: one * size}))
        if low <= size <= high:
            assert check_form(request) is Role.MEMBER
        elif size >= 0:
            with pytest.raises(InvalidInput) as caught:
                check_form(request)
            assert caught.value.metadata["param"] == field


def test_a_nodes_own_is_a_nodes_and_bounded() -> None:
    certificates = [bytes(4096)] * 4
    good: dict[str, Any] = {"addresses": ["127.0.0.1:1"] * 8, "device_chain": certificates}
    assert check_form(membership_pb2.EnrolRequest(**(FORM | good))) is Role.MEMBER
    for spoilt in ({"device_chain": [*certificates, b"x"]}, {"device_chain": [bytes(4097)]}):
        with pytest.raises(InvalidInput) as caught:
            check_form(membership_pb2.EnrolRequest(**(FORM | spoilt)))
        assert caught.value.metadata["param"] == "device_chain"
    bare = FORM | {"role": membership_pb2.ROLE_GATEWAY, "addresses": [], "sealing_key": b""}
    assert check_form(membership_pb2.EnrolRequest(**bare)) is Role.GATEWAY
    for field, value in (
        ("addresses", ["127.0.0.1:1"]),
        ("sealing_key", bytes(32)),
        ("attestation", b"x"),
        ("device_chain", [b"x"]),
    ):
        with pytest.raises(InvalidInput) as caught:
            check_form(membership_pb2.EnrolRequest(**(bare | {field: value})))
        assert caught.value.metadata["param"] == "sealing_key"


async def test_too_many_attempts_are_turned_away(joiner: Joiner) -> None:
    async def hammer() -> None:
        for _ in range(400):
            await joiner.stub.GetNonce(membership_pb2.GetNonceRequest(), timeout=200)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hammer()
    assert from_rpc_error(caught.value).reason == "RATE_LIMITED"


async def test_the_joining_port_serves_nothing_else(cluster: Cluster) -> None:
    from sealring.v1 import admin_pb2_grpc

    root = cluster.coordinator.keys.root
    async with joining_channel(cluster.join_address, root.authorities) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminStub(channel).ListNodes(admin_pb2.ListNodesRequest(), timeout=200)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_nobody_there(tmp_path: Any) -> None:
    token = JoinToken.generate(bytes(32), ["127.0.0.1:1", "127.0.0.1:2"]).format()
    with pytest.raises(SealringError) as caught:
        await enrol(
            token=token,
            role=Role.MEMBER,
            signer=SoftwareSigner.generate(),
            state_dir=tmp_path,
            name="alpha",
            evidence=NodeEvidence(bytes(32), bytes(32), ("127.0.0.1:1",)),
        )
    assert caught.value.reason == "COORDINATOR_UNREACHABLE"
    assert list(tmp_path.iterdir()) == []


async def test_attempts_to_join_are_counted_whatever_is_wrong_with_them() -> None:
    unused: Any = None
    service = EnrolmentService(
        unused, unused, unused, unused, unused, str, clock=lambda: 0.0, attempts_clock=lambda: 0.0
    )
    caller = SimpleNamespace(peer=lambda: "ipv4:192.0.2.1:5")

    async def nothing() -> AsyncIterator[membership_pb2.CodeRequest]:
        for request in ():
            yield request

    reasons = []
    for number in range(201):
        with pytest.raises(SealringError) as caught:
            if number % 2:
                await service.Enrol(membership_pb2.EnrolRequest(), caller)
            else:
                await anext(service.JoinByCode(nothing(), caller))
        reasons.append(caught.value.reason)
    assert reasons.count("RATE_LIMITED") == 1
    assert reasons[-1] == "RATE_LIMITED"


async def test_who_is_thrown_out_does_not_come_back_by_what_is_left_of_its_token(cluster: Cluster) -> None:
    request = admin_pb2.CreateJoinTokenRequest(role=membership_pb2.ROLE_NODE, uses=16)
    made, other = [await cluster.call("CreateJoinToken", request) for _ in range(2)]
    joined = await cluster.join("alpha", token=made.token)
    await cluster.join("beta", token=other.token)
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=joined.state.peer.id))
    await refused(cluster.join("alpha", token=made.token))
    await refused(cluster.join("another", token=made.token))
    listed = (await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())).tokens
    assert [one.token_id for one in listed] == [other.token_id], "tokens of others stay"
    entries = (await cluster.call("ListAuditLog", admin_pb2.ListAuditLogRequest())).entries
    assert (entries[-1].action, entries[-1].subject) == ("revoke_join_token", made.token_id)
    await cluster.join("alpha")
    await cluster.call("BanNode", admin_pb2.BanNodeRequest(id=joined.state.peer.id))
