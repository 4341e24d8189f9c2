"""The attacker as a process of its own: `attacker.py calls|hold|pose|scan`, JSON on its stdin.

It has what an attacker has: keys and certificates that it stole or that another cluster gave it, addresses,
and the cluster's public certificates. What it got is printed as one JSON object a line.
"""

from __future__ import annotations

import sealring  # noqa: F401  # before gRPC, for which it sets what it reads at its import

# isort: split

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from sealring.mesh.crypto import Ed25519Signer, Label, SoftwareSigner
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.member import (
    CalledProof,
    CallerProof,
    Connection,
    HeldRoster,
    Purpose,
    by_identity,
    by_roster_keys,
    parse_pem_leaf,
)
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, TlsMaterial, key_hash
from sealring.mesh.prompt.sealed import SealingKey
from sealring.mesh.rpc import (
    Server,
    TlsStore,
    channel_options,
    from_rpc_error,
    own_release,
    peer_certificate,
    peer_identity,
    server_credentials,
)
from sealring.mesh.trust.attestation import sign_sealing_key
from sealring.v1 import admin_pb2, control_pb2, links_pb2, membership_pb2, membership_pb2_grpc

CALL_SECONDS = 120.0
"""However slow the machine is, a port refuses or answers a call long before."""
PROVED = {
    "Session": (membership_pb2.MemberMessage, membership_pb2.CoordinatorMessage, Purpose.SESSION),
    "Follow": (membership_pb2.FollowRequest, membership_pb2.WatchResponse, Purpose.WATCH),
    "Schedule": (control_pb2.ScheduleRequest, control_pb2.ScheduleResponse, Purpose.SCHEDULE),
}
"""Streams that begin with a proof: messages to and from, and what is proved."""


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps({"at": time.time(), **what}) + "\n")
    sys.stdout.flush()


class Thief:
    """Somebody's state folder, the certificates to trust, and what it would say with them."""

    def __init__(self, state: str, authorities: str) -> None:
        folder = Path(state)
        self.member = json.loads((folder / "member.json").read_text())
        self._credentials = grpc.ssl_channel_credentials(
            Path(authorities).read_bytes(),
            (folder / "tls.key").read_bytes(),
            (folder / "tls.pem").read_bytes(),
        )
        key = folder / "identity.key"
        self._signer = SoftwareSigner.load(key) if key.exists() else SoftwareSigner.generate()
        self._key_hash = key_hash(parse_pem_leaf((folder / "tls.pem").read_bytes()))

    def channel(self, address: str, name: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, self._credentials, options=channel_options(name))

    async def prove(self, stream: Any, method: str, called: str) -> None:
        """Begins a stream as it has to begin, with the identity key that there is."""
        kind = method.rpartition("/")[2]
        if kind not in PROVED:
            return
        request, answer, purpose = PROVED[kind]
        own = self.member["member_id"]
        connection = Connection(
            purpose, self.member["cluster"], own, called if kind == "Schedule" else "", self._key_hash
        )
        proof = CallerProof(connection, HeldRoster())
        await stream.write(request(offer=proof.offer).SerializeToString())
        told = await stream.read()
        if told is grpc.aio.EOF:
            return
        proof.check(answer.FromString(told).proof, lambda content, given: None)
        finish = await proof.finish(by_identity(self._signer))
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await stream.write(request(proof=finish).SerializeToString())
        if purpose is Purpose.SESSION:
            await stream.read()  # that it was accepted, or why not

    def requests(self, cluster: str, ring: str, epoch: int) -> dict[str, Any]:
        """Every method that a port could have, and its first message."""
        sealing = SealingKey().public_key
        csr = LeafKey().csr()
        hello = membership_pb2.Hello(
            software_version="0.1.0",
            instance=bytes(16),
            addresses=["127.0.0.1:9"],
            sealing_key=sealing,
            sealing_key_signature=sign_sealing_key(self._signer, cluster, sealing),
        )
        link = links_pb2.LinkHello(
            ring=ring, epoch=epoch + 100, from_rank=0, to_rank=1, release=own_release()
        )
        attach = control_pb2.Attach(ring=ring, epoch=epoch)
        v1 = "/sealring.v1."
        return {
            f"{v1}Membership/Session": membership_pb2.MemberMessage(hello=hello),
            f"{v1}Certificates/Renew": membership_pb2.RenewRequest(
                csr=csr, signature=self._signer.sign(Label.CSR, csr)
            ),
            f"{v1}Renewal/RenewByIdentity": membership_pb2.RenewByIdentityRequest(
                identity_key=self._signer.public_key,
                csr=csr,
                nonce=bytes(32),
                signature=self._signer.sign(Label.CSR, csr),
            ),
            f"{v1}Scheduling/Follow": membership_pb2.FollowRequest(),
            f"{v1}Admin/ListNodes": admin_pb2.ListNodesRequest(),
            f"{v1}Admin/CreateJoinToken": admin_pb2.CreateJoinTokenRequest(role=membership_pb2.ROLE_NODE),
            f"{v1}Admin/EvictNode": admin_pb2.EvictNodeRequest(id=self.member["member_id"]),
            f"{v1}Links/Handshake": links_pb2.HandshakeFrame(hello=link),
            f"{v1}Control/Schedule": control_pb2.ScheduleRequest(attach=attach),
        }


async def call(
    thief: Thief, target: dict[str, str], method: str, request: Any, *, prove: bool, seconds: float
) -> tuple[str, str, int]:
    """How one call ended and why, and how many messages it brought after the other end's own proof."""
    answers = 0
    channel = thief.channel(target["address"], target["name"])
    begin = prove and method.rpartition("/")[2] in PROVED

    async def messages() -> AsyncIterator[bytes]:  # written by gRPC, which then tells how a call really ended
        yield request.SerializeToString()
        await asyncio.sleep(seconds + 1)

    stream = channel.stream_stream(method)(None if begin else messages(), timeout=seconds)
    try:
        if begin:
            await thief.prove(stream, method, target["name"].partition(".")[0])
            if not method.endswith("Follow"):
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    await stream.write(request.SerializeToString())
        while await stream.read() is not grpc.aio.EOF:
            answers += 1
        return (await stream.code()).name, "", answers
    except grpc.aio.AioRpcError as error:
        return error.code().name, from_rpc_error(error).reason, answers
    except asyncio.InvalidStateError:  # it had ended before we wrote
        metadata = await stream.initial_metadata(), await stream.trailing_metadata()
        ended = grpc.aio.AioRpcError(await stream.code(), *metadata, await stream.details())
        return ended.code().name, from_rpc_error(ended).reason, answers
    finally:
        await channel.close()


async def calls(_: dict[str, Any]) -> None:
    """Tries every method at every target, once for each further line of arguments."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        await call_all(json.loads(line))
        say(done=True)


async def call_all(arguments: dict[str, Any]) -> None:
    thief = Thief(arguments["state"], arguments["authorities"])
    requests = thief.requests(arguments["cluster"], arguments["ring"], arguments["epoch"])

    async def one(target: dict[str, str], method: str) -> None:
        started = time.monotonic()
        prove, seconds = arguments.get("prove", True), CALL_SECONDS
        if method.endswith("Handshake"):
            seconds = arguments.get("handshake_seconds", seconds)
        code, reason, answers = await call(
            thief, target, method, requests[method], prove=prove, seconds=seconds
        )
        say(
            target=target["address"],
            method=method,
            code=code,
            reason=reason,
            answers=answers,
            seconds=time.monotonic() - started,
        )

    await asyncio.gather(*(one(target, method) for target in arguments["targets"] for method in requests))


async def hold(arguments: dict[str, Any]) -> None:
    """Keeps a stream of every kind open at every target and tells when it ends."""
    thief = Thief(arguments["state"], arguments["authorities"])
    requests = thief.requests(arguments["cluster"], arguments["ring"], arguments["epoch"])

    async def one(target: dict[str, str], method: str) -> None:
        channel = thief.channel(target["address"], target["name"])
        stream = channel.stream_stream(method)()
        code = "OK"
        try:
            await thief.prove(stream, method, target["name"].partition(".")[0])
            if not method.endswith("Follow"):
                await stream.write(requests[method].SerializeToString())
            say(opened=method, target=target["address"])
            while (answer := await stream.read()) is not grpc.aio.EOF:
                say(answer=method, target=target["address"], size=len(answer))
            code = (await stream.code()).name
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            code = (await stream.code()).name
        say(ended=method, target=target["address"], code=code)
        await channel.close()

    held = [name for name in requests if name.rpartition("/")[2] in arguments["methods"]]
    await asyncio.gather(*(one(target, name) for target in arguments["targets"] for name in held))


def scan(arguments: dict[str, Any]) -> None:
    """Connects to everything, again and again: garbage, slow bytes, half a TLS hello, another protocol."""
    greetings = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\xff" * 9 + os.urandom(1000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]
    made: int = 0
    open_ones: list[socket.socket] = []
    for _ in range(arguments["rounds"]):
        for port in arguments["ports"]:
            with contextlib.suppress(OSError):
                guest = socket.create_connection(("127.0.0.1", port), timeout=1)
                guest.sendall(random.choice(greetings))
                open_ones.append(guest)
                made += 1
        for guest in open_ones:
            with contextlib.suppress(OSError):
                guest.sendall(os.urandom(1))
        while len(open_ones) > 200:
            open_ones.pop(0).close()
        with contextlib.suppress(OSError, ssl.SSLError):
            _handshake_only(random.choice(arguments["ports"]))
        time.sleep(0.02)
    say(made=made)


def _handshake_only(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=1) as plain,
        context.wrap_socket(plain) as guest,
    ):
        guest.sendall(os.urandom(100))


class Pose(
    membership_pb2_grpc.MembershipServicer,
    membership_pb2_grpc.SchedulingServicer,
    membership_pb2_grpc.CertificatesServicer,
):
    """In the coordinator's place, with a certificate that its authority's stolen key has made."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._sign = by_roster_keys([Ed25519Signer.generate()])

    async def Session(self, requests: Any, context: Any) -> Any:
        async for answer in self._pose(requests, context, Purpose.SESSION, membership_pb2.CoordinatorMessage):
            yield answer

    async def Follow(self, requests: Any, context: Any) -> Any:
        async for answer in self._pose(requests, context, Purpose.WATCH, membership_pb2.WatchResponse):
            yield answer

    async def Renew(self, request: Any, context: Any) -> Any:
        say(heard="renew", purpose="RENEW")
        raise PermissionDenied("no", reason="NOT_ENROLLED")

    async def _pose(self, requests: Any, context: Any, purpose: Purpose, message: Any) -> Any:
        first = await anext(requests)
        say(heard=first.WhichOneof("message"), purpose=purpose.name)
        caller = peer_identity(context)
        connection = Connection(purpose, caller.cluster, caller.id, "", key_hash(peer_certificate(context)))
        proof = CalledProof(connection, first.offer, HeldRoster(), root_version=1)
        if self._how == "wrong proof":
            yield message(proof=await proof.answer(self._sign))
        elif self._how == "no proof":
            yield message(roster=membership_pb2.RosterUpdate(envelope=b"x"))
        else:
            raise PermissionDenied("no", reason="NOT_ENROLLED")
        async for more in requests:
            say(heard=more.WhichOneof("message"), purpose=purpose.name)


async def pose(arguments: dict[str, Any]) -> None:
    """Answers as the coordinator until killed."""
    ca = ClusterCA.load(Path(arguments["authority"]))
    peer = PeerIdentity(arguments["cluster"], Role.COORDINATOR, "main")
    leaf = LeafKey()
    der = ca.issue(leaf.csr(), peer, lifetime=3600, now=time.time(), addresses=("127.0.0.1",))
    store = TlsStore(TlsMaterial(leaf.private_pem(), der, (ca.certificate,)))
    servicer = Pose(arguments["how"])
    server = Server(
        [
            (membership_pb2_grpc.add_MembershipServicer_to_server, servicer, "sealring.v1.Membership"),
            (membership_pb2_grpc.add_SchedulingServicer_to_server, servicer, "sealring.v1.Scheduling"),
            (membership_pb2_grpc.add_CertificatesServicer_to_server, servicer, "sealring.v1.Certificates"),
        ]
    )
    server.listen(arguments["address"], server_credentials(store))
    await server.start()
    say(posing=True)
    await server.wait()


def main() -> None:
    arguments = json.loads(sys.stdin.readline())
    if sys.argv[1] == "scan":
        scan(arguments)
    else:
        asyncio.run({"calls": calls, "hold": hold, "pose": pose}[sys.argv[1]](arguments))


if __name__ == "__main__":
    main()
