"""Either end of the proof that a control stream begins with, for tests that play one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from sealring.mesh.crypto import Signer, member_id
from sealring.mesh.member import (
    CalledProof,
    CallerProof,
    Connection,
    Credentials,
    HeldRoster,
    Purpose,
    SignProof,
    by_identity,
)
from sealring.mesh.pki import key_hash
from sealring.mesh.rpc import peer_certificate, peer_identity
from sealring.v1 import proof_pb2


def identity(signer: Signer, cluster: str, roster: HeldRoster | None = None) -> Credentials:
    held = roster or HeldRoster()
    return Credentials(cluster, member_id(signer.public_key), by_identity(signer), lambda: held)


async def introduce(
    call: Any,
    request: Callable[..., Any],
    own: Credentials,
    certificate: bytes,
    purpose: Purpose,
    *,
    called: str = "",
    parse: Callable[[Any], Any] = lambda answer: answer,
    release: proof_pb2.Release | None = None,
) -> CallerProof:
    """The caller's part, which believes whatever answers. `request` makes a message of its fields; `release`
    is what it claims to run."""
    connection = Connection(purpose, own.cluster, own.id, called, key_hash(certificate))
    proof = CallerProof(connection, own.roster())
    if release is not None:
        proof.offer.release.CopyFrom(release)
    await call.write(request(offer=proof.offer))
    answer = parse(await call.read()).proof
    proof.check(answer, lambda content, given: None)
    try:
        await call.write(request(proof=await proof.finish(own.sign)))
    except (grpc.RpcError, asyncio.InvalidStateError):  # the stream is over: reading tells why
        await call.read()
    if purpose is Purpose.SESSION:
        await call.read()  # that it was accepted, or why not
    return proof


async def answer_offer(
    requests: Any, context: Any, purpose: Purpose, sign: SignProof, *, called: str = "", root_version: int = 1
) -> tuple[CalledProof, proof_pb2.ProofAnswer]:
    """The called end's part: what is answered to the first of `requests`, and what checks the second."""
    caller = peer_identity(context)
    connection = Connection(purpose, caller.cluster, caller.id, called, key_hash(peer_certificate(context)))
    offer = (await anext(requests)).offer
    proof = CalledProof(connection, offer, HeldRoster(), root_version=root_version)
    return proof, await proof.answer(sign)
