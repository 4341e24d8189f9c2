"""Joining by a code end to end: over the real join port, with attackers in the place of either end."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
import structlog
from refusals import refused

from sealring.mesh.crypto import Party
from sealring.mesh.errors import HandshakeError, InvalidInput, RosterError
from sealring.mesh.member import JoinToken, Offer, begin, seal_token, show_code, token_for
from sealring.mesh.pki import to_pem
from sealring.mesh.rpc import from_rpc_error, joining_channel
from sealring.v1 import admin_pb2, membership_pb2, membership_pb2_grpc
from tests.coordinator.conftest import Cluster

CodeRequest = membership_pb2.CodeRequest
CODE = "1234567"


async def make_code(cluster: Cluster, uses: int = 1) -> str:
    answer = await cluster.call("CreateJoinCode", admin_pb2.CreateJoinCodeRequest(uses=uses))
    return str(answer.code)


def offer(cluster: Cluster, *, addresses: tuple[str, ...] = ()) -> Offer:
    return Offer(cluster.coordinator.keys.pin, "test", addresses or (cluster.join_address,))


def other(code: str) -> str:
    return f"{(int(code) + 1) % 10_000_000:07}"


async def test_two_nodes_join_by_one_code_with_tokens_of_their_own(cluster: Cluster) -> None:
    code = await make_code(cluster, uses=2)
    typed = [show_code(code), f" {code} "]
    tokens = [await token_for(offer(cluster), one, deadline=200) for one in typed]
    for name, token in zip("ab", tokens, strict=True):
        await cluster.join(name, token=token.format())
        with refused("JOIN_REFUSED"):
            await cluster.join(f"{name}-again", token=token.format())
    with refused("NO_CODE"):
        await token_for(offer(cluster), code, deadline=200)
    entries = (await cluster.call("ListAuditLog", admin_pb2.ListAuditLogRequest())).entries
    made = [(one.actor, one.action) for one in entries if "join" in one.action]
    assert made == [
        ("operator", "create_join_code"),
        ("join code", "create_join_token"),
        ("join code", "create_join_token"),
    ]


async def test_what_operators_see_of_a_code(cluster: Cluster) -> None:
    listed = await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())
    assert not listed.HasField("code")
    code = await make_code(cluster, uses=3)
    with refused("WRONG_CODE"), structlog.testing.capture_logs() as logs:
        await token_for(offer(cluster), other(code), deadline=200)
    assert [one["tries_left"] for one in logs if one["event"] == "join_code_wrong"] == [4]
    assert not any(one in str(logs) for one in (code, other(code)))
    listed = await cluster.call("ListJoinTokens", admin_pb2.ListJoinTokensRequest())
    assert (listed.code.uses, listed.code.wrong, listed.code.used_up) == (3, 1, False)
    assert code not in str(listed)
    shown = await cluster.call("ShowJoinCode", admin_pb2.ShowJoinCodeRequest())
    assert (shown.code, shown.uses, shown.expires) == (code, 3, listed.code.expires)
    await cluster.call("RevokeJoinCode", admin_pb2.RevokeJoinCodeRequest())
    assert not (await cluster.call("ShowJoinCode", admin_pb2.ShowJoinCodeRequest())).code
    with refused("NO_CODE"):
        await token_for(offer(cluster), code, deadline=200)
    for bad in {"uses": 65}, {"ttl_seconds": 3601}:
        with pytest.raises(InvalidInput):
            await cluster.call("CreateJoinCode", admin_pb2.CreateJoinCodeRequest(**bad))


async def test_a_code_is_of_no_use_at_another_cluster(start_cluster: Any, tmp_path: Any) -> None:
    """Two clusters of one name, and one code at both: the wrong root is found out before the code is used."""
    one, two = await start_cluster(), await start_cluster(state_dir=tmp_path / "other")
    code = await make_code(one)
    store = two.coordinator.store.join_codes
    await make_code(two)
    found = store.find()
    assert found is not None
    store.save(type(found)(code, *list(vars(found).values())[1:]))
    lying = Offer(one.coordinator.keys.pin, "test", (two.join_address,))
    with refused("ROOT_PIN", RosterError):
        await token_for(lying, code, deadline=200)
    async with stub_of(two) as stub:  # and by somebody who does not look at the root either
        with refused("WRONG_CODE"):
            await exchange(stub, code, one.coordinator.keys.pin)
    current = two.coordinator.join_codes.current()
    assert current is not None
    assert current.wrong == 1
    await token_for(
        Offer(one.coordinator.keys.pin, "", (two.join_address, one.join_address)), code, deadline=200
    )


def stub_of(cluster: Cluster) -> Any:
    return _Stub(cluster.join_address, cluster.coordinator.keys.root.authorities)


class _Stub:
    def __init__(self, address: str, authorities: tuple[bytes, ...]) -> None:
        self._channel = joining_channel(address, authorities)

    async def __aenter__(self) -> membership_pb2_grpc.EnrolmentAsyncStub:
        return membership_pb2_grpc.EnrolmentStub(self._channel)  # type: ignore[return-value]

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()


async def say(stub: Any, *messages: CodeRequest) -> list[Any]:
    """The answers to these messages. Raises the error that ends the stream."""
    call = stub.JoinByCode(timeout=200)
    answers = []
    try:
        for message in messages:
            await call.write(message)
            answers.append(await call.read())
        return answers
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()


async def exchange(stub: Any, code: str, pin: bytes) -> tuple[CodeRequest, CodeRequest]:
    """What a caller with this code says. Raises the error that ends the stream."""
    call, own = stub.JoinByCode(timeout=200), begin(Party.A, code, pin)
    first = CodeRequest(share=own.share)
    try:
        await call.write(first)
        agreed = own.finish((await call.read()).share)
        second = CodeRequest(confirmation=agreed.own_confirmation)
        await call.write(second)
        await call.read()
        return first, second
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


async def test_what_a_good_caller_said_is_of_no_use_to_another(cluster: Cluster) -> None:
    code = await make_code(cluster, uses=9)
    async with stub_of(cluster) as stub:
        heard = await exchange(stub, code, cluster.coordinator.keys.pin)
        with refused("WRONG_CODE"):
            await say(stub, *heard)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (CodeRequest(), "BAD_JOIN"),
        (CodeRequest(confirmation=bytes(32)), "BAD_JOIN"),
        (CodeRequest(share=b""), "BAD_SHARE"),
        (CodeRequest(share=bytes(1 << 16)), "BAD_SHARE"),
        (CodeRequest(share=b"\x01" + bytes(31)), "BAD_SHARE"),
        (CodeRequest(share=b"\xff" * 32), "BAD_SHARE"),
    ],
)
async def test_a_first_message_that_is_no_share_costs_no_try(
    cluster: Cluster, first: CodeRequest, reason: str
) -> None:
    await make_code(cluster)
    async with stub_of(cluster) as stub:
        with refused(reason):
            await say(stub, first, first)
    current = cluster.coordinator.join_codes.current()
    assert current is not None
    assert current.wrong == 0


async def test_what_the_coordinator_says_before_it_is_convinced_is_one_share(cluster: Cluster) -> None:
    """No confirmation of its own: a caller could compare that with its guess, and no try would be counted."""
    await make_code(cluster)
    first = CodeRequest(share=begin(Party.A, CODE, bytes(32)).share)
    async with stub_of(cluster) as stub:
        (answer,) = await say(stub, first)
        assert answer.WhichOneof("message") == "share"
        for second in first, CodeRequest():
            with refused("BAD_JOIN"):
                await say(stub, first, second)
        with refused("WRONG_CODE"):
            await say(stub, first, CodeRequest(confirmation=b""))


class Impostor(membership_pb2_grpc.EnrolmentServicer):
    """Stands at the cluster's address with its certificate. Only `knows` has the code."""

    def __init__(self, how: str, pin: bytes) -> None:
        self.how, self.pin, self.calls = how, pin, 0

    async def JoinByCode(self, requests: Any, context: Any) -> Any:
        self.calls += 1
        share = (await anext(requests)).share
        own = begin(Party.B, CODE if self.how == "knows" else other(CODE), self.pin)
        agreed = own.finish(share)
        answer = {"reflects": share, "no point": b"\xff" * 32}.get(self.how, own.share)
        yield membership_pb2.CodeAnswer(share=answer)
        confirmation = (await anext(requests)).confirmation
        if self.how == "ends":
            return
        if self.how == "knows":
            assert agreed.confirmed_by(confirmation)
            confirmation = agreed.own_confirmation
        token = JoinToken.generate(bytes(32), ["10.0.0.1:1"]).format()
        sealed = seal_token(agreed.key, token)
        yield membership_pb2.CodeAnswer(
            token=membership_pb2.CodeToken(confirmation=confirmation, sealed=sealed)
        )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reflects", "BAD_ANSWER"),
        ("guesses", "BAD_ANSWER"),
        ("ends", "BAD_ANSWER"),
        ("no point", "BAD_SHARE"),
        ("knows", "BAD_ANSWER"),
    ],
)
async def test_neither_an_impostor_nor_a_token_of_another_cluster_is_believed(
    cluster: Cluster, how: str, reason: str
) -> None:
    impostor, server = Impostor(how, cluster.coordinator.keys.pin), grpc.aio.server()
    membership_pb2_grpc.add_EnrolmentServicer_to_server(impostor, server)
    material = cluster.coordinator.tls.current()[1]
    pair = [(material.private_key, to_pem(material.certificate))]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    await server.start()
    try:
        with refused(reason, HandshakeError):
            await token_for(offer(cluster, addresses=(f"127.0.0.1:{port}",)), CODE, deadline=200)
        assert impostor.calls == 1, "one guess for each time that a person types"
    finally:
        await server.stop(None)


async def test_who_is_thrown_out_does_not_come_back_by_the_code_that_it_saw(cluster: Cluster) -> None:
    code = await make_code(cluster, uses=9)
    token = await token_for(offer(cluster), code, deadline=200)
    joined = await cluster.join("alpha", token=token.format())
    await cluster.call("EvictNode", admin_pb2.EvictNodeRequest(id=joined.state.peer.id))
    with refused("NO_CODE"):
        await token_for(offer(cluster), code, deadline=200)
